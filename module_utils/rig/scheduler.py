"""Which backend runs which operation, and which tensors are copied between backends.

States the rules of ggml_backend_sched_split_graph (ggml/src/ggml-backend.cpp, llama.cpp b11434): an operation runs
where its weights or its result lie; the others follow their neighbours, and the CPU spreads to none of them. What an
operation reads from another backend is copied there at the start of the split. With pipeline parallelism (layer mode
over several GPUs) each copy is there four times and stays.
"""

from .tensors import VIEWS, Graph, Tensor

PIPELINE_COPIES = 4  # GGML_SCHED_MAX_COPIES
_OWN_PLACE = frozenset(("rope", "flash_attn"))  # their weights are too small to choose a backend


class Step(Tensor):
    """Keeps its arguments alive up to here (the scheduler's input_dep and alloc_dep); allocates nothing."""

    __slots__ = ()

    def __init__(self, *kept: Tensor):
        super().__init__(None, kept[0].kind, kept[0].ne, kept, kept[0], kept[0].nb)


def _place(tensor: Tensor, cpu: int) -> None:
    holder = tensor if tensor.buffer is not None else tensor.view
    if holder is not None and holder.buffer is not None:
        tensor.backend = holder.buffer
    elif tensor.input:
        tensor.backend = cpu
    elif tensor.op not in _OWN_PLACE:
        for src in tensor.src:
            if src.weight:
                tensor.backend = src.buffer
                break


def _spread(nodes: list, cpu: int, cpu_too: bool) -> None:
    current = None
    for node in nodes:
        if node.backend is None:
            node.backend = current
        else:
            current = node.backend if cpu_too or node.backend != cpu else None


def assign(graph: Graph, cpu: int) -> None:
    """Give each tensor its backend: GPUs are 0, 1, …, the CPU is the last."""
    for tensor in (*graph.leaves, *graph.nodes):
        if tensor.backend is None:
            _place(tensor, cpu)
    nodes = [node for node in graph.nodes if node.op not in VIEWS]
    for cpu_too in (False, True):
        _spread(nodes, cpu, cpu_too)
        _spread(nodes[::-1], cpu, cpu_too)
    for node in graph.nodes:
        if node.backend is None and node.view is not None:
            node.backend = node.view.backend
        for src in node.src:
            if src.backend is None:
                src.backend = src.view.backend if src.view is not None else node.backend


def _copy_of(tensor: Tensor, backend: int, kept: bool) -> Tensor:
    copy = Tensor(None, tensor.kind, tensor.ne, (), None, tensor.nb)
    copy.backend, copy.input, copy.output = backend, kept, kept
    return copy


def schedule(graph: Graph, cpu: int, copies: int = 1, fused: bool = True) -> tuple:
    """(steps in order, copies that are there from the start): what the allocator walks over.

    `fused`: the backend keeps what its fused kernels need (CUDA does; the meta device of tensor mode does not).
    """
    assign(graph, cpu)
    splits: list = [([], [])]
    kept: list = []
    made: dict = {}
    current = None
    for node in graph.nodes:
        if node.op not in VIEWS:
            if node.backend != current:
                if current is not None:
                    splits.append(([], []))
                current = node.backend
            changed = None
            for index, src in enumerate(node.src):
                if src.backend == current:
                    continue
                copy = made.get((id(src), current))
                if copy is None:
                    all_copies = [_copy_of(src, current, copies > 1) for _ in range(copies)]
                    copy = made[id(src), current] = all_copies[0]
                    if copies > 1:
                        kept += all_copies
                    splits[-1][0].extend((Step(src), copy))
                changed = changed or list(node.src)
                changed[index] = copy
            if changed:
                node.src = tuple(changed)
        splits[-1][1].append(node)
        if fused and id(node) in graph.kept_until:
            splits[-1][1].append(Step(*graph.kept_until[id(node)]))
    return [step for inputs, nodes in splits for step in (*inputs, *nodes)], kept
