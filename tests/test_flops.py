"""The peak of a GPU by the name that torch gives it."""

import pytest

from finetune.flops import peak_flops_of

TERA = 1e12
PEAKS = {  # dense bf16, from the vendors' data sheets
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A40": 150,
    "NVIDIA A10": 125,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 4090": 165,
    "AMD Instinct MI300X": 1307,
}
UNKNOWN = ("NVIDIA RTX A4000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A10G")


@pytest.mark.parametrize("name", PEAKS)
def test_a_gpu_has_the_peak_of_its_own_version(name: str) -> None:
    assert peak_flops_of(name) == PEAKS[name] * TERA


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_only_looks_like_a_known_one_has_no_peak(name: str) -> None:
    assert peak_flops_of(name) is None
