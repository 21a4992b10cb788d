"""The models of the cases: bitwise invariant, so that nothing is forgiven."""

from tests.cases.conftest import any_tiny, real, tiny, tiny_folder, trial

__all__ = ["any_tiny", "real", "tiny", "tiny_folder", "trial"]
