"""The trainable parameters of a torch module: their layout, reading, writing, saving.

The exchange sees a module as fragments of flat float32 vectors. No other file knows which tensor an
element belongs to.

A model that torch has spread over several processes (FSDP2, HSDP, TP) has DTensors as parameters.
Layout and digests are those of the whole tensors, so an island of many ranks has the layout of a
single process; `local_part` is what this process holds of one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import Tensor, nn

from narrows.learner.saving import file_order, write_state
from narrows.proto.codec import F32
from narrows.proto.errors import ConfigError, ErrorCode, LocalProtocolError
from narrows.proto.layout import Fragment, Piece
from narrows.proto.messages import DtypeName, Layout, LayoutEntry, MergeRule

DTYPES: Final[Mapping[torch.dtype, DtypeName]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
RULES: Final[tuple[MergeRule, ...]] = ("mean", "rda")
WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts that torch.compile and activation checkpointing add to the names of submodules."""

_log = logging.getLogger("narrows.learner")


class Parameters:
    """The parameters of one module as the exchange reads and writes them.

    Tied weights travel once, under their first name. Names are those inside wrappers. Parameters
    that do not require gradients stay where they are; their digest tells learners with other ones
    apart.

    Merge rules: `mean` for the weights of `nn.Embedding` and whatever is tied to them, for the
    output head and for tensors of at most one dimension, else `rda`. The output head is the last
    `nn.Linear`, if it has as many outputs as some embedding has rows. `merge_rules` maps patterns
    (fnmatch, against any name of a tensor) to rules; the last match wins.

    Raises LocalProtocolError MISUSE for a module that cannot be exchanged, ConfigError for a
    pattern that matches nothing or an unknown rule.
    """

    def __init__(self, model: nn.Module, merge_rules: Mapping[str, str] | None = None) -> None:
        self.module = unwrapped(model)
        self._gathering = [each for each in self.module.modules() if _is_kind(each, "FSDPModule")]
        self.reshard()
        _check_usable(self.module)
        tied = _tied(_named(self.module, trainable=True))
        self.tensors = [tensor for tensor, _ in tied]
        self.names = [names for _, names in tied]
        """Every name of each tensor of the layout; the one that travels comes first."""
        entries = self._entries(merge_rules or {})
        self.layout = Layout(frozen_digest(_named(self.module, trainable=False)), entries)
        self._views: dict[Piece, tuple[list[int], Tensor]] = {}
        """The view of each piece, and the address of its tensor when the view was made."""
        self._arrays: dict[int, tuple[object, list[F32] | None]] = {}
        """By fragment, the pieces and the addresses of their tensors, and what `arrays` made of
        them."""

    def reshard(self) -> None:
        """Has FSDP2 give up the whole parameters that it keeps after a forward pass without a
        backward one. While it keeps them `parameters()` yields them instead of the shards, and the
        next forward pass does not see what is written to the shards. Call it before parameters are
        looked at and after they have moved, never between a forward pass and its backward pass."""
        for each in self._gathering:
            each.reshard()  # type: ignore[operator]

    def read(self, fragment: Fragment, out: F32) -> None:
        """Copies a fragment to host memory; `out` is float32 (fragment.elements,)."""
        host = torch.from_numpy(out)
        for piece in fragment.pieces:
            view = self.view(piece)
            host[piece.offset : piece.offset + piece.count].view(view.shape).copy_(view)

    def write(self, fragment: Fragment, values: F32) -> None:
        """Overwrites a fragment in place, rounded to each parameter's dtype, half to even.

        `values` is float32 (fragment.elements,). Like an optimizer's step this must not happen
        between a forward pass and its backward pass.
        """
        # torch warns when it is lent read-only memory, even if it only reads there.
        source = torch.from_numpy(values if values.flags.writeable else values.copy())
        for piece in fragment.pieces:
            view = self.view(piece)
            view.copy_(source[piece.offset : piece.offset + piece.count].view(view.shape))

    def view(self, piece: Piece) -> Tensor:
        """The elements of a piece, sharing the parameter's memory, outside of autograd.

        Shape (count,) if the parameter is contiguous, else (rows, ...). Remembered until the
        parameter gets other memory, as from `model.to(...)`. Not for a process that holds a part of
        the parameter.
        """
        address = addresses_of([self.tensors[piece.tensor]])
        if piece in self._views:
            known_address, view = self._views[piece]
            if known_address == address:
                return view
        view = elements_of(local_part(self.tensors[piece.tensor]), piece)
        self._views[piece] = address, view
        return view

    def arrays(self, fragment: Fragment) -> list[F32] | None:
        """The pieces as arrays (count,) that share the parameters' memory. None: they cannot, as
        they are not all contiguous float32 in host memory. Remembered as `view` is, for all pieces
        at once: to look each one up took longer than to move it."""
        place = (
            fragment.pieces,
            addresses_of([self.tensors[piece.tensor] for piece in fragment.pieces]),
        )
        known_place, arrays = self._arrays.get(fragment.index, (None, None))
        if known_place == place:
            return arrays
        views = [self.view(piece) for piece in fragment.pieces]
        usable = all(
            (view.device.type, view.dtype, view.dim()) == ("cpu", torch.float32, 1)
            for view in views
        )
        arrays = [view.numpy() for view in views] if usable else None
        self._arrays[fragment.index] = place, arrays
        return arrays

    def dtype(self, piece: Piece) -> DtypeName:
        """The parameter's own precision, to which adopted values are rounded."""
        return DTYPES[self.tensors[piece.tensor].dtype]

    def state_dict(self) -> dict[str, Any]:
        """The module's state under clean names: every tied name, every persistent buffer.

        The tensors share the model's memory, as those of `nn.Module.state_dict` do.
        """
        return {clean_name(name): value for name, value in self.module.state_dict().items()}

    def save(
        self, path: str | os.PathLike[str], metadata: Mapping[str, str], *, writes: bool = True
    ) -> None:
        """Writes `state_dict()` as safetensors, for a strict `load_state_dict`.

        One tensor after the other is made whole and written, so besides the model there is room for
        one tensor only. All ranks of a sharded model must call it, and one of them `writes`.
        Missing folders are made. An older file is replaced only by a complete one.
        """
        state = self._savable()
        tensors = (whole(state[name]) for name in file_order(state))
        try:
            if writes:
                write_state(Path(path), state, tensors, metadata)
            else:
                _log.info("rank 0 writes %s", path)
        finally:
            # The other ranks wait for this one's part of every tensor, whatever went wrong here.
            for _ in tensors:
                pass

    def _savable(self) -> dict[str, Tensor]:
        state = self.state_dict()
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise misuse(
                    f"the state {name!r} is no tensor, which safetensors cannot hold",
                    remedy="Keep state_dict() with torch.save instead.",
                )
        return state

    def _entries(self, merge_rules: Mapping[str, str]) -> tuple[LayoutEntry, ...]:
        chosen = _chosen_rules(merge_rules, self.names)
        averaged = _averaged(self.module)
        entries: list[LayoutEntry] = []
        for tensor, names, rule in zip(self.tensors, self.names, chosen, strict=True):
            averages = tensor.dim() <= 1 or id(tensor) in averaged
            default: MergeRule = "mean" if averages else "rda"
            shape = tuple(tensor.shape) or (1,)
            entries.append(LayoutEntry(names[0], shape, DTYPES[tensor.dtype], rule or default))
        return tuple(entries)


def elements_of(tensor: Tensor, piece: Piece) -> Tensor:
    """The elements of a piece in a tensor of the parameter's shape, sharing its memory: (count,) if
    that is contiguous, else (rows, ...)."""
    if tensor.is_contiguous():
        return tensor.view(-1)[piece.start : piece.start + piece.count]
    row_elements = tensor.numel() // tensor.shape[0]
    first, rest = divmod(piece.start, row_elements)
    assert not rest and not piece.count % row_elements, "a piece is made of whole rows"
    return tensor[first : first + piece.count // row_elements]


def misuse(message: str, **detail: str) -> LocalProtocolError:
    """The error that tells a user what to change in the loop or in the model."""
    return LocalProtocolError(ErrorCode.MISUSE, message, **detail)


def check_same_model(fingerprints: Sequence[str]) -> None:
    """`fingerprints` are those of the layouts of an island's ranks, by rank. Raises
    LocalProtocolError MISUSE unless all ranks have the same parameters."""
    others = [rank for rank, each in enumerate(fingerprints) if each != fingerprints[0]]
    if others:
        raise misuse(
            f"ranks {', '.join(map(str, others))} have other parameters than rank 0",
            expected="the same names, shapes, dtypes, merge rules and frozen values on all ranks",
            got="other layouts, as with pipeline parallelism",
            remedy="Pipeline parallelism is not supported: shard the model with fully_shard, or"
            " with tensor parallelism. Without it, build the same model on every rank.",
        )


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process holds a part."""
    return _is_kind(tensor, "DTensor")


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, sharing its memory, outside of autograd."""
    held: Any = tensor.detach()
    part: Tensor = held.to_local() if is_sharded(tensor) else held
    return part


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a DTensor: then every rank of its mesh must call it."""
    held: Any = tensor.detach()
    if is_sharded(tensor):
        if held.device.type != held.device_mesh.device_type:
            # FSDP2 may keep its shards in host memory, where a mesh of GPUs cannot gather them.
            held = held.to(held.device_mesh.device_type)
        held = held.full_tensor()
    made: Tensor = held
    return made


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """The addresses of the tensors' memory here. The wrapper of a DTensor has none: its part has.
    Every step asks, so this calls nothing else."""
    return [getattr(tensor, "_local_tensor", tensor).data_ptr() for tensor in tensors]


def _is_kind(thing: object, name: str) -> bool:
    """Whether a class of this name is among its classes. To import those of torch.distributed costs
    a second, and some builds of torch lack them."""
    return any(kind.__name__ == name for kind in type(thing).__mro__)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers whose one and only content is `module` (DistributedDataParallel)
    or `_orig_mod` (torch.compile)."""
    while True:
        children = dict(model.named_children())
        own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
        if own or set(children) not in ({"module"}, {"_orig_mod"}):
            return model
        (model,) = children.values()


def clean_name(name: str) -> str:
    """A name without the parts that wrappers of submodules add to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def frozen_digest(named: Iterable[tuple[str, Tensor]]) -> int:
    """xxh3_64 over the names (each with a NUL) and the bytes, sorted by name; 0 for none. All ranks
    of a sharded model call it; one tensor after the other is made whole."""
    tensors = dict(named)
    if not tensors:
        return 0
    hasher = xxhash.xxh3_64()
    for name in sorted(tensors):
        hasher.update(name.encode() + b"\0")
        flat = whole(tensors[name]).cpu().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.intdigest()


def _named(module: nn.Module, *, trainable: bool) -> list[tuple[str, Tensor]]:
    named = module.named_parameters(remove_duplicate=False)
    return [(clean_name(name), each) for name, each in named if each.requires_grad == trainable]


def _tied(named: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Each tensor once, with all its names. One weight is one Parameter, or two that share all of
    their memory; two that share a part of it, or in another shape, are refused: what moves one
    would move the other."""
    groups: dict[object, dict[str, Tensor]] = {}
    """By memory, the tensors that share all of it, by name."""
    for name, tensor in named:
        groups.setdefault(_memory(tensor), {})[name] = tensor
    tied = [(next(iter(group.values())), tuple(group)) for group in groups.values()]

    ends: dict[torch.device, tuple[int, str]] = {}
    """By device, the address behind the tensors looked at so far, and a name of the last one."""
    plain = [pair for pair in tied if not is_sharded(pair[0])]
    for tensor, (name, *_) in sorted(plain, key=lambda pair: pair[0].data_ptr()):
        start = tensor.data_ptr()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end, other = ends.get(tensor.device, (0, ""))
        if start < end:
            raise misuse(
                f"parameters {other!r} and {name!r} share memory in different shapes",
                remedy="Tie them as one Parameter and transpose it where it is used.",
            )
        ends[tensor.device] = (start + (last + 1) * tensor.element_size(), name)
    return tied


def _memory(tensor: Tensor) -> object:
    """Equal for tensors that share all of their memory. DTensors are tied if they are one: what a
    process holds of them may be empty, and all ranks must come to the same layout."""
    if is_sharded(tensor):
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride()


def _averaged(module: nn.Module) -> set[int]:
    """Ids of the weights of embeddings, of the output head, and of what is tied to them."""
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    rows = {table.num_embeddings for table in tables}
    heads = [linear for linear in linears[-1:] if linear.out_features in rows]
    memory = {_memory(each.weight) for each in [*tables, *heads]}
    return {id(each) for each in module.parameters() if _memory(each) in memory}


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
        matched = [
            index
            for index, tensor_names in enumerate(names)
            if any(fnmatchcase(name, pattern) for name in tensor_names)
        ]
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
    """Refuses what cannot be exchanged, and names the parameter."""
    if any(_is_kind(each, "FullyShardedDataParallel") for each in module.modules()):
        raise misuse(
            "the model is sharded by FullyShardedDataParallel (FSDP1), which hides its parameters",
            expected="FSDP2, whose parameters are DTensors",
            remedy="Use torch.distributed.fsdp.fully_shard(model) instead.",
        )
    for name, tensor in module.named_parameters():
        problem, remedy = _problem(tensor)
        if problem:
            raise misuse(f"parameter {clean_name(name)!r} {problem}", remedy=remedy)
    if not any(tensor.requires_grad for tensor in module.parameters()):
        raise misuse(
            "the model has no trainable parameter",
            remedy="Set requires_grad on what shall be trained before the Learner is made.",
        )


def _problem(tensor: Tensor) -> tuple[str, str]:
    """Why a parameter cannot be exchanged, and the remedy; empty texts: it can."""
    if nn.parameter.is_lazy(tensor):
        return "has no shape yet", "Run one forward pass first."
    if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        return "is a partial DTensor, a sum not made yet", "Redistribute it as Shard or Replicate."
    if tensor.is_meta:
        return "is on the meta device", "Give the model memory: model.to_empty(device=...)."
    if tensor.layout != torch.strided:
        return f"is sparse ({tensor.layout})", "Use a dense parameter."
    if tensor.requires_grad and tensor.dtype not in DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"has dtype {dtype}", f"Use one of {', '.join(DTYPES.values())} or freeze it."
    if tensor.requires_grad and not tensor.numel():
        return "has no elements", "Remove or freeze it."
    return "", ""
