"""A GPU of pretence: tensors that say they are on `cuda`, whose numbers lie in host memory and are computed there.

What it shows without a GPU: that tensors of host and device are mixed nowhere where a GPU would refuse it, that code for
devices gives the results that it should, how often the host waits for the device, and that a captured graph reads and writes
what it was captured with. What it can't show: speed, and what other kernels round.

Each operation on such tensors arrives here (`torch.utils._python_dispatch`), is checked, and runs on the host's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
# The size of what these give depends on values, so a GPU has to be asked first.
READ_BACK = ("aten::nonzero", "aten::masked_select", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
# Operations that take indices from the host, which are copied over then.
TAKES_HOST = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class OnDevice(Tensor):
    """What programs hold. held: the numbers. To torch itself it is a `meta` tensor, for which it looks for no driver."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        about: dict[str, Any] = {
            "strides": held.stride(),
            "storage_offset": held.storage_offset(),
            "dtype": held.dtype,
            "device": "meta",
        }
        with torch.inference_mode(held.is_inference()):  # a view of what was made before it is none of its tensors
            made: OnDevice = Tensor._make_wrapper_subclass(cls, held.size(), **about)
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        assert _running, "a tensor of the simulated GPU outlived it"
        return _running[-1].run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        del force
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"


_running: list[SimulatedGPU] = []


class SimulatedGPU(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered. waits: what the host had to wait for, in turn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # with which torch looks for no driver
        self.waits: list[str] = []
        self.graph: Graph | None = None  # that is being captured

    def __enter__(self) -> SimulatedGPU:
        _running.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        _running.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return self.run(func, args, kwargs or {})

    def wait(self, what: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.waits.append(what)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        flat, spec = tree_flatten((args, kwargs))
        theirs = [one for one in flat if isinstance(one, OnDevice)]
        wanted = next((one for one in flat if isinstance(one, torch.device)), None)
        loading = wanted is not None and wanted.type == "meta" and _by_default()
        there = ("cuda",) if loading else ("cuda", "meta")  # as which torch makes what it needs beside such tensors
        if not theirs and (wanted is None or wanted.type not in there):
            return func(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):  # as they are in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        hosts = [one for one in flat if isinstance(one, Tensor) and not isinstance(one, OnDevice) and one.dim() > 0]
        if name == "aten::_to_copy":
            return self._copied(func, flat, spec, wanted, bool(theirs))
        if name == "aten::_fused_sdp_choice" and theirs:
            return 0  # sums written out: the host's fused kernels are not the device's
        if not theirs:
            assert not hosts, name
            return OnDevice(func(*args, **{**kwargs, "device": "cpu"}))
        if hosts:
            self._mixed(name, args)
        if name in READ_BACK or (name == "aten::index" and any(_is_mask(one) for one in args[1])):
            self.wait(name)
        if wanted is not None:
            if wanted.type not in there:
                return func(*tree_map_only(OnDevice, _held, args), **{**kwargs, "device": "cpu"})
            flat, spec = tree_flatten((args, {**kwargs, "device": torch.device("cpu")}))
        return self._on_device(func, flat, spec)

    def _mixed(self, name: str, args: Any) -> None:
        """What a GPU allows of host tensors beside its own: they are copied, for which the host waits."""
        if name in TAKES_HOST and isinstance(args[0], OnDevice):
            self.wait(f"{name} by indices of the host")
        elif name == "aten::copy_":
            self.wait("copy_ between host and device")
        else:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices: {name}")

    def _copied(self, func: Any, flat: list[Any], spec: Any, wanted: torch.device | None, there: bool) -> Any:
        """`Tensor.to`: across if it says so."""
        args, kwargs = tree_unflatten([_held(one) for one in flat], spec)
        to = there if wanted is None else wanted.type in ("cuda", "meta")
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if to != there:
            if not to:
                self.wait("read back")
            elif not kwargs.get("non_blocking"):
                self.wait("copy from pageable memory")
            elif self.graph is not None:
                raise RuntimeError("a graph would read the host's memory again at each replay")
        made = func(*args, **kwargs)
        if self.graph is not None and to:
            self.graph.add(func, args, kwargs, made)
        return OnDevice(made) if to else made

    def _on_device(self, func: Any, flat: list[Any], spec: Any) -> Any:
        """Run it on what is held; what it gives back is the device's, and the argument itself where it wrote into that."""
        args, kwargs = tree_unflatten([_held(one) for one in flat], spec)
        made = func(*args, **kwargs)
        if self.graph is not None:
            self.graph.add(func, args, kwargs, made)
        known = {id(one.held): one for one in flat if isinstance(one, OnDevice)}
        if func._schema.name == "aten::_local_scalar_dense":
            return made
        return tree_map_only(Tensor, lambda one: known[id(one)] if id(one) in known else OnDevice(one), made)


def _by_default() -> bool:
    """Whether the device is that of a `with torch.device(…)` block: loading makes models of `meta` tensors so."""
    frame = sys._getframe(1)
    skipped = (__file__, "torch/_compile.py", "torch/_dynamo/eval_frame.py")
    while frame.f_back is not None and frame.f_code.co_filename.endswith(skipped):
        frame = frame.f_back
    return frame.f_code.co_filename.endswith("torch/utils/_device.py")


def _held(one: Any) -> Any:
    return one.held if isinstance(one, OnDevice) else one


def _is_mask(one: Any) -> bool:
    return isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)


class Graph:
    """A captured graph: the operations with the memory that they read and wrote."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def add(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        self._calls.append((func, args, kwargs, made))

    @property
    def launches(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """Again, into the same memory."""
        for func, args, kwargs, made in self._calls:
            new = tree_flatten(func(*args, **kwargs))[0]
            for before, now in zip(tree_flatten(made)[0], new, strict=True):
                if isinstance(before, Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0
        self.timed = enable_timing

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        return

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later._at - self._at)


class _Stream:
    def __init__(self, device: object = None) -> None:
        del device

    def wait_stream(self, other: _Stream) -> None:
        del other


@contextmanager
def _stream(stream: _Stream) -> Iterator[None]:
    del stream
    yield


@contextmanager
def _graph(graph: Graph) -> Iterator[None]:
    gpu = _running[-1]
    assert gpu.graph is None
    gpu.graph = graph
    try:
        yield
    finally:
        gpu.graph = None


def _to_numbered(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, which asks the driver for the number of a device that has none."""
    return _to(tensor, *(_numbered(one) for one in args), **{name: _numbered(one) for name, one in kwargs.items()})


_to = Tensor.to


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """`torch.tensor`."""
    made = _made(data, **kwargs)
    return made if device is None else made.to(device)


_made = torch.tensor


def _numbered(one: Any) -> Any:
    return CUDA if isinstance(one, str | torch.device) and torch.device(one) == torch.device("cuda") else one


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGPU]:
    """A machine that has one, until the block ends."""
    gpu = SimulatedGPU()
    replaced: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "simulated GPU",
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda device=None: gpu.wait("synchronize"),
        "Event": Event,
        "Stream": _Stream,
        "stream": _stream,
        "current_stream": lambda device=None: _Stream(device),
        "CUDAGraph": Graph,
        "graph": _graph,
    }
    with pytest.MonkeyPatch.context() as patch, gpu:
        for name, other in replaced.items():
            patch.setattr(torch.cuda, name, other)
        patch.setattr(Tensor, "to", _to_numbered)
        patch.setattr(torch, "tensor", _tensor)
        patch.setattr(Tensor, "pin_memory", lambda tensor, device=None: tensor)
        yield gpu
