"""A GPU of pretence: tensors that say they are on `cuda`, whose numbers lie in host memory and are computed there.

What it shows without a GPU: that tensors of host and device are mixed nowhere where a GPU would refuse it, that code for
devices gives the results that it should, how often the host waits for the device, and that a captured graph reads and writes
what it was captured with. What it can't show: speed, and what other kernels round.

Each operation on such tensors arrives here (`torch.utils._python_dispatch`), is checked, and runs on the host's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.helpers.simulated_graphs import Capture, Event, Graph, Stream, streams

aten = torch.ops.aten
# What these give, or its size, depends on values, so a GPU has to be asked first.
READ_BACK = {
    *("aten::nonzero", "aten::argwhere", "aten::masked_select", "aten::_local_scalar_dense", "aten::is_nonzero"),
    *("aten::equal", "aten::allclose"),
    *("aten::unique_dim", "aten::_unique", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim_consecutive"),
    *("aten::bincount", "aten::histc", "aten::repeat_interleave", "aten::_linalg_check_errors"),
}
# Operations that take indices from the host, which are copied over then; those that are masks are read back.
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
        made: OnDevice
        if held.is_inference() == torch.is_inference_mode_enabled():
            made = Tensor._make_wrapper_subclass(cls, held.size(), **about)
        else:  # a view of what was made before that mode is none of its tensors
            with torch.inference_mode(held.is_inference()):
                made = Tensor._make_wrapper_subclass(cls, held.size(), **about)
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
        return _running[-1].place if _running else torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, OnDevice)
        assert (other.shape, other.dtype) == (self.shape, self.dtype)
        self.held = other.held

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
        self.place = torch.device("cuda", 0)  # where its tensors are

    @property
    def capturing(self) -> bool:
        """Whether operations are recorded now."""
        return self.graph is not None

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        """As another device than the current one, for tensors that are made meanwhile."""
        before, self.place = self.place, torch.device("cuda", index)
        try:
            yield
        finally:
            self.place = before

    def __enter__(self) -> SimulatedGPU:
        _running.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        _running.remove(self)

    @property
    def recording(self) -> Graph | None:
        """The graph that gets what is launched now."""
        graph = self.graph
        return graph if graph is not None and streams.current(self.place) is graph.stream else None

    def wait(self, what: str) -> None:
        if self.graph is not None:
            self.graph.broken = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.waits.append(what)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        about = _about(func)
        name = about.name
        there_already, wanted, hosts = _looked_over(args, kwargs)
        loading = wanted is not None and wanted.type == "meta" and _by_default()
        there = ("cuda",) if loading else ("cuda", "meta")  # as which torch makes what it needs beside such tensors
        if not there_already and (wanted is None or wanted.type not in there):
            return func(*args, **kwargs)
        if about.composite:  # as they are in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        if name == "aten::_to_copy":
            return self._copied(func, args, kwargs, wanted, there_already)
        if name == "aten::_fused_sdp_choice" and there_already:
            return 0  # sums written out: the host's fused kernels are not the device's
        if not there_already:
            assert not hosts, name
            return self._launched(func, args, {**kwargs, "device": torch.device("cpu")})
        if any(one.dim() > 0 for one in hosts) or (hosts and name == "aten::copy_"):
            self._mixed(name, args)
        masked = name in TAKES_HOST and any(_is_mask(one) for one in args[1])
        if masked or (name in READ_BACK and kwargs.get("output_size") is None):
            self.wait(name)
        if wanted is not None:
            if wanted.type not in there:
                return func(*_mapped(args), **{**_mapped(kwargs), "device": "cpu"})
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return self._launched(func, args, kwargs, hosts)

    def _mixed(self, name: str, args: Any) -> None:
        """What a GPU allows of host tensors beside its own: they are copied, for which the host waits."""
        if name in TAKES_HOST and isinstance(args[0], OnDevice):
            self.wait(f"{name} by indices of the host")
        elif name == "aten::copy_":
            self.wait("copy_ between host and device")
        else:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices: {name}")

    def _copied(self, func: Any, args: Any, kwargs: Any, wanted: torch.device | None, there: bool) -> Any:
        """`Tensor.to`: across if it says so."""
        to = there if wanted is None else wanted.type in ("cuda", "meta")
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if to != there:
            if not to:
                self.wait("read back")
            elif not kwargs.get("non_blocking"):
                self.wait("copy from pageable memory")
            elif self.graph is not None:
                raise RuntimeError("a graph would read the host's memory again at each replay")
        return self._launched(func, args, kwargs) if to else func(*_mapped(args), **kwargs)

    def _launched(self, func: Any, args: Any, kwargs: Any, hosts: Sequence[Tensor] = ()) -> Any:
        """Run it on what is held; what it gives back is the device's, and the argument itself where it wrote into that."""
        written = (
            {id(one.held): one for one in _leaves(args, kwargs) if type(one) is OnDevice} if _about(func).writes else {}
        )
        args, kwargs = _mapped(args), _mapped(kwargs)
        graph = self.recording
        if graph is not None:
            graph.about_to(func, args, kwargs)
        made = func(*args, **kwargs)
        if graph is not None:
            graph.add(func, args, kwargs, made)
        if isinstance(made, Tensor):
            if hosts and any(made is one for one in hosts):
                return made
            return written[id(made)] if id(made) in written else OnDevice(made)
        return tree_map_only(Tensor, lambda one: written[id(one)] if id(one) in written else OnDevice(one), made)


def _dispatch(gpu: SimulatedGPU, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    del types
    return gpu.run(func, args, kwargs or {})


SimulatedGPU.__torch_dispatch__ = _dispatch  # type: ignore[method-assign,assignment]  # in the class torch would wrap it, for a compiler


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    """What an operation is called with, lists of it taken apart."""
    found: list[Any] = []
    for one in (*args, *kwargs.values()) if kwargs else args:
        if type(one) is list or type(one) is tuple:
            found += one
        else:
            found.append(one)
    return found


def _looked_over(args: Any, kwargs: Any) -> tuple[bool, torch.device | None, list[Tensor]]:
    """Whether there are tensors of the device among them, the device that is asked for, and tensors of the host."""
    there, wanted, hosts = False, None, []
    for one in _leaves(args, kwargs):
        kind = type(one)
        if kind is OnDevice:
            there = True
        elif kind in _PLAIN:
            continue
        elif isinstance(one, Tensor):
            hosts.append(one)
        elif kind is torch.device:
            wanted = one
    return there, wanted, hosts


_PLAIN = {int, float, bool, type(None), torch.dtype, str, torch.layout}


def _mapped(one: Any) -> Any:
    """The same with what is held."""
    kind = type(one)
    if kind is OnDevice:
        return one.held
    if kind is list or kind is tuple:
        return kind([each.held if type(each) is OnDevice else _mapped(each) for each in one])
    return {name: _mapped(each) for name, each in one.items()} if kind is dict else one


@dataclass(frozen=True)
class _About:
    """What is known of an operation, func: its name, whether it writes into its arguments, whether it is made of others."""

    func: Any
    name: str
    writes: bool
    composite: bool


_ABOUT: dict[int, _About] = {}
"""By `id`, since operations are slow to hash."""


def _about(func: Any) -> _About:
    known = _ABOUT.get(id(func))
    if known is None:
        name = str(func._schema.name)
        writes = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
        # Of linear and matmul torch's own code in Python is slow.
        made_of_others = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        composite = bool(made_of_others) and name not in ("aten::linear", "aten::matmul")
        known = _ABOUT[id(func)] = _About(func, name, writes, composite)
    return known


def _by_default() -> bool:
    """Whether the device is that of a `with torch.device(…)` block: loading makes models of `meta` tensors so."""
    frame = sys._getframe(1)
    skipped = (__file__, "torch/_compile.py", "torch/_dynamo/eval_frame.py")
    while frame.f_back is not None and frame.f_code.co_filename.endswith(skipped):
        frame = frame.f_back
    return frame.f_code.co_filename.endswith("torch/utils/_device.py")


def _is_mask(one: Any) -> bool:
    return isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)


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
    return _running[-1].place if isinstance(one, str | torch.device) and torch.device(one) == torch.device("cuda") else one


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGPU]:
    """A machine that has one, until the block ends."""
    gpu = SimulatedGPU()
    replaced: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: streams.device.index,
        "get_device_name": lambda device=None: "simulated GPU",
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda device=None: gpu.wait("synchronize"),
        "empty_cache": lambda: None,
        "Event": Event,
        "Stream": Stream,
        "device": streams.on_device,
        "stream": streams.on,
        "set_stream": streams.set,
        "current_stream": streams.current,
        "CUDAGraph": Graph,
        "graph_pool_handle": object,
        "graph": Capture,
    }
    Capture.gpu, Stream.gpu = gpu, gpu
    with pytest.MonkeyPatch.context() as patch, gpu:
        for name, other in replaced.items():
            patch.setattr(torch.cuda, name, other)
        patch.setattr(Capture, "default_stream", None)
        patch.setattr("outrider.models.passes.cuda_graphs._side_streams", {})
        patch.setattr(Tensor, "to", _to_numbered)
        patch.setattr(Tensor, "cuda", lambda tensor, device="cuda": tensor.to(device))
        patch.setattr(torch, "tensor", _tensor)
        patch.setattr(Tensor, "pin_memory", lambda tensor, device=None: tensor)
        yield gpu
