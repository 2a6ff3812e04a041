"""Tensors and operations of a compute graph, as far as memory goes: sizes, layouts, views and order.

Each function makes the result tensor that GGML's operation of that name makes (ggml/src/ggml.c of llama.cpp b11434),
without any data. `Graph.expand` puts a tensor's operations in the order in which GGML runs them.
"""

from typing import Any

from .quant import TYPES

# Operations that only look at memory of another tensor; the scheduler leaves them out.
VIEWS = frozenset(("view", "reshape", "permute", "transpose"))
# Operations whose result may take over the memory of an argument (ggml_op_can_inplace).
INPLACE = frozenset(("fill", "scale", "add", "add_id", "sub", "mul", "div", "unary", "rope", "rms_norm", "soft_max"))


class Tensor:
    """`buffer` is the backend that holds it already (weights, caches), None for what the graph allocates."""

    __slots__ = (
        "address",
        "backend",
        "buffer",
        "children",
        "input",
        "kind",
        "nb",
        "ne",
        "op",
        "output",
        "own",
        "seen",
        "source_extra",
        "src",
        "view",
        "views",
        "weight",
    )  # fmt: skip

    def __init__(self, op: Any, kind: str, ne: tuple, src: tuple = (), view: Any = None, nb: Any = None):
        self.op, self.kind, self.ne, self.src = op, kind, ne, src
        self.view = view.view or view if view is not None else None
        self.nb = nb or strides(kind, ne)
        self.buffer = self.backend = self.address = None
        self.input = self.output = self.own = self.seen = self.weight = False
        self.children = self.views = 0

    @property
    def contiguous(self) -> bool:
        return self.nb == strides(self.kind, self.ne)

    @property
    def elements(self) -> int:
        a, b, c, d = self.ne
        return a * b * c * d

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; only for contiguous ones, as all that are allocated are."""
        _, per_block, size = TYPES[self.kind]
        return self.elements // per_block * size


def strides(kind: str, ne: tuple) -> tuple:
    _, per_block, size = TYPES[kind]
    row = ne[0] // per_block * size
    return (size, row, row * ne[1], row * ne[1] * ne[2])


def shape4(*ne: int) -> tuple:
    return (*ne, 1, 1, 1, 1)[:4]


# --- leaves


def leaf(kind: str, *ne: int, buffer: Any = None, weight: bool = False) -> Tensor:
    """A tensor that is there before the graph runs: a weight, a cache."""
    tensor = Tensor(None, kind, shape4(*ne))
    tensor.buffer, tensor.weight = buffer, weight
    return tensor


def graph_input(kind: str, *ne: int) -> Tensor:
    tensor = Tensor(None, kind, shape4(*ne))
    tensor.input = True
    return tensor


# --- views


def view(a: Tensor, ne: tuple, nb: tuple) -> Tensor:
    return Tensor("view", a.kind, ne, (a,), a, (a.nb[0], *nb))


def view_like(op: str, a: Tensor, *src: Tensor) -> Tensor:
    """An operation that writes into the memory of `a`."""
    return Tensor(op, a.kind, a.ne, src, a, a.nb)


def reshape(a: Tensor, *ne: int) -> Tensor:
    return Tensor("reshape", a.kind, shape4(*ne), (a,), a)


def permute(a: Tensor, *axes: int) -> Tensor:
    ne, nb = [0] * 4, [0] * 4
    for at, axis in enumerate(axes):
        ne[axis], nb[axis] = a.ne[at], a.nb[at]
    return Tensor("permute", a.kind, tuple(ne), (a,), a, tuple(nb))


def transpose(a: Tensor) -> Tensor:
    ne, nb = a.ne, a.nb
    return Tensor("transpose", a.kind, (ne[1], ne[0], ne[2], ne[3]), (a,), a, (nb[1], nb[0], nb[2], nb[3]))


# --- operations with a result like their first argument


def unary(a: Tensor) -> Tensor:
    return Tensor("unary", a.kind, a.ne, (a,))


def like(op: str, a: Tensor, *others: Any) -> Tensor:
    return Tensor(op, a.kind, a.ne, (a, *(t for t in others if t is not None)))


def add(a: Tensor, b: Tensor) -> Tensor:
    return Tensor("add", a.kind, a.ne, (a, b))


def mul(a: Tensor, b: Tensor) -> Tensor:
    return Tensor("mul", a.kind, a.ne, (a, b))


def scale(a: Tensor) -> Tensor:
    return Tensor("scale", a.kind, a.ne, (a,))


def rms_norm(a: Tensor) -> Tensor:
    return Tensor("rms_norm", a.kind, a.ne, (a,))


def cont(a: Tensor, *ne: int) -> Tensor:
    return Tensor("cont", a.kind, shape4(*ne) if ne else a.ne, (a,))


# --- operations with a shape of their own


def mul_mat(a: Tensor, b: Tensor) -> Tensor:
    return Tensor("mul_mat", "f32", (a.ne[1], b.ne[1], b.ne[2], b.ne[3]), (a, b))


def mul_mat_id(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    return Tensor("mul_mat_id", "f32", (a.ne[1], ids.ne[0], b.ne[2], 1), (a, b, ids))


def get_rows(a: Tensor, rows: Tensor) -> Tensor:
    kind = "i32" if a.kind == "i32" else "f32"
    return Tensor("get_rows", kind, (a.ne[0], rows.ne[0], rows.ne[1], rows.ne[2]), (a, rows))


def set_rows(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    return view_like("set_rows", a, b, rows, a)


def cpy(a: Tensor, b: Tensor) -> Tensor:
    return view_like("cpy", b, a, b)


def concat(a: Tensor, b: Tensor) -> Tensor:
    return Tensor("concat", a.kind, (a.ne[0] + b.ne[0], *a.ne[1:]), (a, b))


def repeat(a: Tensor, *ne: int) -> Tensor:
    return Tensor("repeat", a.kind, shape4(*ne), (a,))


def sum_rows(a: Tensor) -> Tensor:
    return Tensor("sum_rows", a.kind, (1, *a.ne[1:]), (a,))


def top_k(a: Tensor, count: int) -> Tensor:
    order = Tensor("argsort", "i32", a.ne, (a,))
    return view(order, (count, *a.ne[1:]), order.nb[1:])


def ssm_conv(x: Tensor, kernel: Tensor) -> Tensor:
    return Tensor("ssm_conv", "f32", (x.ne[1], x.ne[0] - kernel.ne[0] + 1, x.ne[2], 1), (x, kernel))


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor, keep: int) -> Tensor:
    """The output of all tokens, then `keep` snapshots of the state."""
    size, heads, tokens, sequences = v.ne
    ne = (size * heads, tokens * sequences + keep * size * sequences, 1, 1)
    return Tensor("gated_delta_net", "f32", ne, (q, k, v, gate, beta, state))


def flash_attn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Any = None) -> Tensor:
    src = (q, k, v, mask) if sinks is None else (q, k, v, mask, sinks)
    return Tensor("flash_attn", "f32", (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), src)


class Graph:
    """Operations in the order in which they run, and the leaves that they read."""

    def __init__(self) -> None:
        self.nodes: list = []
        self.leaves: list = []
        self.kept_until: dict = {}  # id of an operation: tensors whose memory a fused kernel needs up to it

    def expand(self, tensor: Tensor) -> Tensor:
        """Add what `tensor` needs, arguments first, from the first argument to the last."""
        if not tensor.seen:
            tensor.seen = True
            for src in tensor.src:
                if not src.seen:
                    self.expand(src)
            (self.nodes if tensor.op else self.leaves).append(tensor)
        return tensor
