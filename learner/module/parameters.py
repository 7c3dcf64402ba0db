"""Reads and writes the parameters of any torch module: layout, snapshot, adopt, final state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn

from narrows.learner.module.master_weights import MasterWeightsWatch
from narrows.proto.codec import F32
from narrows.proto.errors import ConfigError, ErrorCode, LocalProtocolError
from narrows.proto.messages import DtypeName, LayoutEntry, MergeRule

if TYPE_CHECKING:
    from narrows.proto.fragments import Fragment, Piece

_Memory: TypeAlias = tuple[int, torch.device, torch.Size, tuple[int, ...]]

DTYPES: Mapping[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
RULES: tuple[MergeRule, ...] = ("mean", "rda")
BUFFER_SAMPLED_ELEMENTS = 64


class ModuleParameters:
    """The trainable parameters of a module, as the exchange sees them: a ParameterHost.

    Tied weights travel once, under their first name. Names are those of the module inside
    wrappers such as `DistributedDataParallel` and `torch.compile`. Parameters that do not require
    gradients stay where they are; their digest tells learners with other ones apart.

    Merge rules: `mean` for the weights of `nn.Embedding` and whatever is tied to them, for the
    output head and for tensors of at most one dimension, else `rda`. The output head is the last
    `nn.Linear` of the module, if it has as many outputs as some embedding has rows; only the last
    one counts, because a hidden layer may well be as wide as a small vocabulary. `merge_rules`
    maps patterns (fnmatch, against any name of a tensor) to rules; the last match wins.

    Errors: LocalProtocolError(MISUSE) for a module that cannot be exchanged, ConfigError for a
    pattern that matches nothing or an unknown rule.
    """

    def __init__(self, model: nn.Module, merge_rules: Mapping[str, str] | None = None) -> None:
        self.module = unwrapped(model)
        _check_usable(self.module)
        self._tensors: list[Tensor] = []
        self.names: list[tuple[str, ...]] = []
        """Every name of each tensor of the layout, the one that travels first."""
        for tensor, names in _tied(_parameters(self.module, trainable=True)):
            self._tensors.append(tensor)
            self.names.append(names)
        self.layout: tuple[LayoutEntry, ...] = self._build_layout(merge_rules or {})
        self.frozen_digest = digest(_parameters(self.module, trainable=False))
        self._buffers = {name: _buffer_mark(b) for name, b in self._floating_buffers()}
        self._watch = MasterWeightsWatch(self.view)
        self._views: dict[Piece, tuple[int, Tensor]] = {}
        """By piece: the address of the parameter's memory, and the view of it."""

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        """Copies a fragment to host memory: out is float32 (fragment.elements,), contiguous."""
        host = _tensor(out)
        for piece in fragment.pieces:
            view = self.view(piece)
            host[piece.offset : piece.offset + piece.count].view(view.shape).copy_(view)

    def adopt(self, fragment: Fragment, values: F32) -> None:
        """Overwrites a fragment in place, rounded to each parameter's dtype, half to even.

        values is float32 (fragment.elements,), contiguous. Like an optimizer's step this must not
        happen between a forward pass and its backward pass.
        """
        # torch warns when it is lent read-only memory, even if it only reads there.
        source = _tensor(values if values.flags.writeable else values.copy())
        with self._watch.adoption(fragment):
            for piece in fragment.pieces:
                view = self.view(piece)
                view.copy_(source[piece.offset : piece.offset + piece.count].view(view.shape))

    @property
    def devices(self) -> set[torch.device]:
        """Where the parameters are."""
        return {tensor.device for tensor in self._tensors}

    def strangers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of the tensors whose memory is no part of the layout."""
        own = {_memory(tensor) for tensor in self._tensors}
        return [tensor for tensor in tensors if _memory(tensor) not in own]

    def check_adopted(self) -> None:
        """Call at each boundary, before anything is adopted there.

        Raises LocalProtocolError(MISUSE) when the optimizer undid two adoptions running.
        """
        self._watch.check()

    def view(self, piece: Piece) -> Tensor:
        """The elements of a piece, sharing the parameter's memory, outside of autograd.

        Shape (count,) if the parameter is contiguous, else (rows, ...). Remembered until the
        parameter gets other memory, as from `model.to(...)`.
        """
        address = self._tensors[piece.tensor].data_ptr()
        known = self._views.get(piece)
        if known is None or known[0] != address:
            known = self._views[piece] = (address, self._new_view(piece))
        return known[1]

    def _new_view(self, piece: Piece) -> Tensor:
        tensor: Tensor = self._tensors[piece.tensor].detach()
        if tensor.is_contiguous():
            return tensor.view(-1)[piece.start : piece.start + piece.count]
        row_elements = tensor.numel() // tensor.shape[0]
        first, rest = divmod(piece.start, row_elements)
        if rest or piece.count % row_elements:
            raise LocalProtocolError(
                ErrorCode.BAD_RANGE, "a piece of a non-contiguous tensor is not made of whole rows"
            )
        return tensor[first : first + piece.count // row_elements]

    def state_dict(self) -> dict[str, Any]:
        """The module's state under clean names: every tied name, every persistent buffer.

        The tensors share the model's memory, as those of `nn.Module.state_dict` do.
        """
        state: dict[str, Any] = self.module.state_dict()
        return {clean_name(name): value for name, value in state.items()}

    def save(self, path: str | os.PathLike[str], standing: Mapping[str, str] | None = None) -> None:
        """Writes `state_dict()` as safetensors, for a strict `load_state_dict`.

        Missing folders are made. An older file is replaced only by a complete one. `standing` goes
        into the metadata: see Client.standing.
        """
        metadata = {"format": "pt", "narrows.final": "false", **(standing or {})}
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            save_file(_separate(self.state_dict()), unfinished, metadata=metadata)
            # A crash while the file is written leaves the older one whole.
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)

    def changed_buffers(self) -> list[str]:
        """Names of persistent floating-point buffers written to or replaced since construction.

        Reads a few elements of each: on a device that waits for it.
        """
        return [
            name
            for name, buffer in self._floating_buffers()
            if name not in self._buffers or _buffer_mark(buffer) != self._buffers[name]
        ]

    def _floating_buffers(self) -> Iterator[tuple[str, Tensor]]:
        # Buffers that are not persistent are caches by their own declaration.
        persistent = self.module.state_dict(keep_vars=True).keys()
        for name, buffer in self.module.named_buffers():
            if name in persistent and buffer.is_floating_point():
                yield clean_name(name), buffer

    def _build_layout(self, merge_rules: Mapping[str, str]) -> tuple[LayoutEntry, ...]:
        chosen = _chosen_rules(merge_rules, self.names)
        averaged = _averaged_memory(self.module)
        entries: list[LayoutEntry] = []
        for tensor, names, rule in zip(self._tensors, self.names, chosen, strict=True):
            averages = tensor.dim() <= 1 or _memory(tensor) in averaged
            shape = tuple(tensor.shape) or (1,)
            default: MergeRule = "mean" if averages else "rda"
            entries.append(LayoutEntry(names[0], shape, DTYPES[tensor.dtype], rule or default))
        return tuple(entries)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers whose one and only content is `module` or `_orig_mod`."""
    while True:
        children = dict(model.named_children())
        own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
        if own or set(children) not in ({"module"}, {"_orig_mod"}):
            return model
        (model,) = children.values()


def clean_name(name: str) -> str:
    """A name without the parts that `torch.compile` adds to those of compiled submodules."""
    return name.replace("_orig_mod.", "")


def digest(named: Iterable[tuple[str, Tensor]]) -> int:
    """xxh3_64 over the names (each with a NUL) and the bytes, sorted by name; 0 for none."""
    tensors = dict(named)
    if not tensors:
        return 0
    hasher = xxhash.xxh3_64()
    for name in sorted(tensors):
        hasher.update(name.encode() + b"\0")
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.intdigest()


def _parameters(module: nn.Module, *, trainable: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if tensor.requires_grad == trainable:
            yield clean_name(name), tensor


def _memory(tensor: Tensor) -> _Memory:
    """Identity of a weight: two names of one weight have it in common, whether they name one
    Parameter or two on the same memory."""
    return tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride()


def _tied(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
    groups: dict[_Memory, tuple[Tensor, list[str]]] = {}
    for name, tensor in named:
        groups.setdefault(_memory(tensor), (tensor, []))[1].append(name)
    _check_separate(groups.values())
    for tensor, names in groups.values():
        yield tensor, tuple(names)


def _check_separate(groups: Iterable[tuple[Tensor, list[str]]]) -> None:
    """Refuses weights on one memory in two shapes: what moves one would move the other."""
    ends: dict[torch.device, tuple[int, str]] = {}
    for tensor, names in sorted(groups, key=lambda group: group[0].data_ptr()):
        start = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end, other = ends.get(tensor.device, (0, ""))
        if start < end:
            raise _misuse(
                f"parameters {other!r} and {names[0]!r} share memory in different shapes",
                remedy="Tie them as one Parameter and transpose it where it is used.",
            )
        ends[tensor.device] = (start + reach * tensor.element_size(), names[0])


def _averaged_memory(module: nn.Module) -> set[_Memory]:
    """Embeddings and the output head; see ModuleParameters."""
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    heads = [m for m in linears[-1:] if any(m.out_features == t.num_embeddings for t in tables)]
    return {_memory(m.weight) for m in [*tables, *heads]}


def _chosen_rules(
    merge_rules: Mapping[str, str], names: Sequence[tuple[str, ...]]
) -> list[MergeRule | None]:
    chosen: list[MergeRule | None] = [None] * len(names)
    for pattern, text in merge_rules.items():
        rule: MergeRule | None = next((known for known in RULES if known == text), None)
        if rule is None:
            raise ConfigError(
                f"unknown merge rule for {pattern!r}", expected=" or ".join(RULES), got=repr(text)
            )
        matched = [i for i, ns in enumerate(names) if any(fnmatchcase(n, pattern) for n in ns)]
        if not matched:
            every = [name for tensor_names in names for name in tensor_names]
            raise ConfigError(
                f"merge_rules: no trainable parameter matches {pattern!r}",
                expected=", ".join(get_close_matches(pattern, every, cutoff=0.0)),
            )
        for index in matched:
            chosen[index] = rule
    return chosen


def _check_usable(module: nn.Module) -> None:
    """Refuses, naming the parameter, what cannot be exchanged."""
    trainable = 0
    for name, tensor in module.named_parameters():
        problem, remedy = _problem(tensor)
        if problem:
            raise _misuse(f"parameter {clean_name(name)!r} {problem}", remedy=remedy)
        trainable += tensor.requires_grad
    if not trainable:
        raise _misuse(
            "the model has no trainable parameter",
            remedy="Set requires_grad on what shall be trained before the Learner is made.",
        )


def _problem(tensor: Tensor) -> tuple[str, str]:
    """Fault of a parameter and its remedy; ("", "") if it can be exchanged."""
    if nn.parameter.is_lazy(tensor):
        return "has no shape yet", "Run one forward pass first."
    if any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):
        return "is a DTensor", "A learner is one process; sharded models are not supported."
    if tensor.is_meta:
        return "is on the meta device", "Give the model memory: model.to_empty(device=...)."
    if tensor.layout != torch.strided:
        return f"is sparse ({tensor.layout})", "Use a dense parameter."
    if tensor.requires_grad and tensor.dtype not in DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"has dtype {kind}", f"Use one of {', '.join(DTYPES.values())} or freeze it."
    if tensor.requires_grad and not tensor.numel():
        return "has no elements", "Remove or freeze it."
    return "", ""


def _tensor(array: F32) -> Tensor:
    return torch.from_numpy(array)


def _misuse(message: str, **detail: str) -> LocalProtocolError:
    return LocalProtocolError(ErrorCode.MISUSE, message, **detail)


def _buffer_mark(buffer: Tensor) -> tuple[int, bytes]:
    """Mark that changes when a buffer is written to: its count of writes and a sample's bytes.

    Both, because batch norm writes without counting, and other writes may miss the sample.
    """
    # Tensors made under inference_mode count no writes; asking for the count raises.
    writes = -1 if buffer.is_inference() else buffer._version
    flat = buffer.detach().reshape(-1)
    sample = flat[:: 1 + flat.numel() // BUFFER_SAMPLED_ELEMENTS].to(torch.float32)
    return writes, sample.cpu().numpy().tobytes()


def _separate(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Contiguous copies on the host; no two of them share memory, as safetensors demands."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise _misuse(
                f"the state {name!r} is no tensor, which safetensors cannot hold",
                remedy="Keep state_dict() with torch.save instead.",
            )
        tensor = value.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return separate
