"""A model whose layers lie on two devices writes what it writes on one.

The devices are pretended (`two_devices.py`): what is shown is that nothing is computed from tensors of
both, and that nothing is mistaken on the way; not how fast it is, nor that memory is enough.

Planted faults these tests catch: positions, slots to write or slots to copy that stay where the model
is fed; a cross-attention cache filled, or read, across devices; a relative bias where its layer is not;
logits that stay where the last layer is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch cannot pretend to have other devices",
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "t5_gated"])
def test_texts_do_not_depend_on_where_layers_lie(name: str) -> None:
    command = [sys.executable, "-m", "tests.models.two_devices", name]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "12 of 12 texts are the same\n"
