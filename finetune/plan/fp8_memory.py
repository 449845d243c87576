"""What a linear layer that multiplies in FP8 holds while it casts: nothing of it lives from forward to backward.

torchao casts by way of fp32: at its largest a cast holds two fp32 copies and the 8-bit numbers. torch.compile fuses that away.
Measured by torch's allocator in tests/plan/test_fp8.py.
"""

from collections.abc import Iterator

from finetune.plan.run_spec import RunSpec

CAST = 9  # bytes of a number that is cast without a compiler: two fp32 copies, and 8 bits
# On a CPU the product is larger than the cast: torch multiplies copies in fp32 there. Bytes of a number of input, output, weight.
CPU_PRODUCT = (18, 12, 18)


def fp8_bytes(spec: RunSpec, tokens: int) -> int:
    """Bytes that the layer with the most holds for `tokens` tokens; 0 where nothing is multiplied in FP8."""
    return max(_of_each_linear(spec, tokens), default=0)


def _of_each_linear(spec: RunSpec, tokens: int) -> Iterator[int]:
    multiplied, gathered = spec.fp8_weights, spec.fp8_gathered
    for linear in spec.architecture.linears():
        if linear.name not in multiplied:
            continue
        width_out, width_in = linear.shape
        inputs, outputs, weight = tokens * width_in, tokens * width_out, linear.numel
        copies = inputs + 2 * outputs + 2 * weight  # in 8 bits: of the gradient and the weight by rows and by columns
        if spec.device == "cpu":
            parts = zip(CPU_PRODUCT, (inputs, outputs, weight), strict=True)
            yield copies + max(size * numbers for size, numbers in parts)
        elif spec.recipe.model.torch_compile:
            yield copies
        else:
            yield copies + CAST * max(inputs, outputs, 0 if linear.name in gathered else weight)
