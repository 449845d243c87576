"""What training minimizes: an `Objective` for fine-tuning, for preferences and for distillation."""
