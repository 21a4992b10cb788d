"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest

from kernels.cpu.build import BuildUnavailable, Variant, usable_variants
from kernels.cpu.library import Library
from tests.conftest import skip_or_fail

PORTABLE = "-DMS_PORTABLE_DOT"  # the product in plain C++, which a processor without a dot product of bytes takes


@pytest.fixture(scope="session")
def libraries() -> list[Library]:
    """Every variant that this processor runs, and the plain one."""
    variants = usable_variants()
    if not variants:
        skip_or_fail("this processor has none of AVX2, AVX-512 and NEON")
    plain = Variant(f"{variants[-1].name}-plain", variants[-1].needs, (*variants[-1].flags, PORTABLE))
    try:
        return [Library(variant) for variant in (*variants, plain)]
    except BuildUnavailable as error:
        skip_or_fail(str(error))
        raise
