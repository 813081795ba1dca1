"""Tests run on the CPU, from the root of the project; every process of theirs has one thread."""
import os
import sys
from pathlib import Path

# before torch is imported: a test process and all that it starts get their thread count here
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest  # noqa: E402

from helpers import write_corpus  # noqa: E402


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """Path (str) of a small prepared store with 300 ids; tests only read it."""
    from data import prepare
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    return str(prepare([str(folder)], vocab_size=300, out=f"{folder}-store"))
