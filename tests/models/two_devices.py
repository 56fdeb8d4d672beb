"""Decodes with a model whose layers lie on two devices, on a machine that has one.

    python -m tests.models.two_devices llama

The devices are made of CPU tensors that say they lie elsewhere. An operation on tensors of two devices
is refused, as CUDA refuses it, and tensors go from one to the other by `.to` alone. Layers are moved, and
what they are given goes along, as accelerate does it for `device_map`: at the blocks of its map. It is a
program of its own because PyTorch takes such devices for a whole process. Prints how many texts are
what the same model writes on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from pipeline.models.causal import CausalModel
from pipeline.models.interface import LanguageModel
from pipeline.models.seq2seq import Seq2SeqModel
from pipeline.models.slots import ATTENTION
from pipeline.records import Sampling, Setting, Strategy
from tests.loop import decode
from tests.tiny import EOS, SEQ2SEQ, VOCABULARY, hf_model, slot_model

PROMPTS = [list(range(3, 3 + length)) for length in (4, 9, 2, 17, 6, 11)]
STRATEGIES = [Strategy("spec_decode"), Strategy("spec_cascade.diff", alpha=0.1)]
SETTING = Setting(3, 12, Sampling(0.0), eos_token_ids=(EOS,))
DEVICE = "pretended"
backend_registration._setup_privateuseone_for_python_backend(DEVICE)
FIRST, SECOND = (torch.device(DEVICE, index) for index in (0, 1))
MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Elsewhere(Tensor):
    """A CPU tensor that says it lies on one of the devices."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[Elsewhere], held: Tensor, device: torch.device) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(function, args, kwargs or {})


def computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # A number on the CPU goes with any device.
    devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
    if len(devices) > 1 and function not in MOVES:
        raise RuntimeError(f"{function} on {sorted(map(str, devices))}")
    asked = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    if asked is None:  # `copy_` writes to its first tensor, wherever that lies
        first = tensors[0].device if function in MOVES else None
        asked = first or next(iter(devices), torch.device("cpu"))
    result = function(*tree_map(plain, args), **tree_map(plain, kwargs))
    return tree_map(partial(wrapped, asked, tensors), result)


def plain(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.held if isinstance(value, Elsewhere) else value


def wrapped(target: torch.device, given: Sequence[Tensor], value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    for tensor in given:  # an operation in place returns what it was given
        if plain(tensor) is value and tensor.device == target:
            return tensor
    return Elsewhere(value, target) if target.type == DEVICE else value


class Devices(TorchDispatchMode):
    """Makes tensors on the devices where there is no tensor yet to say so."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(function, args, kwargs or {})


class Made(TorchFunctionMode):
    """`torch.tensor` and `new_tensor` go around dispatch: make theirs here, and take it there."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.new_tensor:
            return torch.tensor(*args[1:], dtype=args[0].dtype).to(args[0].device)
        if function is not torch.tensor:
            return function(*args, **kwargs)
        device = kwargs.pop("device", None)
        made = function(*args, **kwargs)
        return made if device is None else made.to(device)


def placed(module: nn.Module, device: torch.device) -> None:
    """Move a block, and have what it is given follow it."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            part._parameters[name] = nn.Parameter(parameter.detach().to(device), False)
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = buffer.to(device)
    module.register_forward_pre_hook(partial(follow, device), with_kwargs=True)


def follow(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return tree_map(moved, args), tree_map(moved, kwargs)


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """What is never split, in the order of computing."""
    inner = model.base_model
    if model.config.is_encoder_decoder:
        ends = [model.encoder.final_layer_norm, model.decoder.final_layer_norm]
        return [model.shared, *model.encoder.block, ends[0], *model.decoder.block, ends[1]]
    if hasattr(inner, "layers"):
        return [inner.embed_tokens, inner.rotary_emb, *inner.layers, inner.norm]
    return [inner.wte, inner.wpe, *inner.h, inner.ln_f]


def split_model(name: str, seed: int) -> LanguageModel:
    """The tiny model with its first half on one device, and the second on the other."""
    model = hf_model(name, seed)
    model.set_attn_implementation(ATTENTION)
    blocks = blocks_of(model)
    if name in SEQ2SEQ:
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
    for number, block in enumerate(blocks):
        placed(block, FIRST if 2 * number < len(blocks) else SECOND)
    placed(model.lm_head, SECOND)
    model.forward = partial(coming_back, model.forward)
    return Seq2SeqModel(model, VOCABULARY) if name in SEQ2SEQ else CausalModel(model, VOCABULARY)


def coming_back(forward: Callable[..., Any], **given: Any) -> Any:
    """What the whole model returns lies where its input lay."""
    device = given["input_ids"].device
    output = forward(**given)
    for key, value in output.items():
        if isinstance(value, Tensor):
            output[key] = value.to(device)
    return output


def texts(make: Callable[[str, int], LanguageModel], name: str) -> dict[Any, Any]:
    models = make(name, 1), make(name, 0)
    outcomes = decode(*models, PROMPTS, STRATEGIES, SETTING, slots=4)
    return {key: outcome.output_ids for key, outcome in outcomes.items()}


def main(name: str) -> None:
    torch.set_num_threads(1)
    expected = texts(slot_model, name)
    with torch.inference_mode(), Devices(), Made():
        got = texts(split_model, name)
    same = sum(got[key] == ids for key, ids in expected.items())
    print(f"{same} of {len(expected)} texts are the same")


if __name__ == "__main__":
    main(sys.argv[1])
