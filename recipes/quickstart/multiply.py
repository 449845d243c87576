"""The tool of quickstart_tools: transformers makes its JSON schema from type hints and
docstring.
"""


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: A factor.
        b: A factor.

    Returns:
        Their product.
    """
    return a * b
