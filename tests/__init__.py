"""Makes every test file one module under one name: without it a file that another imports ran twice, as models.x and tests.models.x."""
