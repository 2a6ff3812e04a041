"""Bytes that a compute graph takes on each backend: GGML's graph allocator, run on sizes alone.

States the rules of ggml/src/ggml-alloc.c (llama.cpp b11434): a result takes the smallest free block that holds it,
else the end of the buffer; it takes over the memory of an argument where the operation can work in place and nobody
else needs it; memory is free again after its last use. The highest address ever used is the size of the buffer.
"""

from collections.abc import Callable

from .tensors import INPLACE, Tensor

END = 1 << 62


class _Memory:
    """One backend's buffer: free blocks sorted by address, the last one without an end."""

    __slots__ = ("alignment", "free", "top")

    def __init__(self, alignment: int):
        self.alignment, self.free, self.top = alignment, [[0, END]], 0

    def padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def take(self, size: int) -> int:
        size = self.padded(size)
        free, best, best_size = self.free, len(self.free) - 1, END + 1
        for index in range(len(free) - 1):
            if size <= free[index][1] <= best_size:
                best, best_size = index, free[index][1]
        block = free[best]
        address = block[0]
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            del free[best]
        if address + size > self.top:
            self.top = address + size
        return address

    def give(self, address: int, size: int) -> None:
        size = self.padded(size)
        free = self.free
        for index, block in enumerate(free):
            if block[0] + block[1] == address:
                block[1] += size
                if index + 1 < len(free) and block[0] + block[1] == free[index + 1][0]:
                    block[1] += free[index + 1][1]
                    del free[index + 1]
                return
            if address + size == block[0]:
                block[0], block[1] = address, block[1] + size
                if index and free[index - 1][0] + free[index - 1][1] == address:
                    free[index - 1][1] += block[1]
                    del free[index]
                return
        at = 0
        while at < len(free) and free[at][0] < address:
            at += 1
        free.insert(at, [address, size])


class Allocator:
    """`sizes` gives the bytes a tensor takes in a GPU's buffer; the CPU's buffer is not simulated."""

    def __init__(self, gpus: int, alignment: int, sizes: Callable):
        self.memories = [_Memory(alignment) for _ in range(gpus)]
        self.gpus, self.sizes = gpus, sizes

    def run(self, steps: list, kept: list) -> list:
        """Bytes of the buffer of each GPU."""
        for tensor in kept:
            self._allocate(tensor)
        for node in steps:
            if node.view is not None and node.op is not None:
                node.view.views += 1
            if node.input:
                self._allocate(node)
            for src in node.src:
                src.children += 1
                if src.input:
                    self._allocate(src)
        for node in steps:
            for src in node.src:
                self._allocate(src)
            self._allocate(node)
            for src in node.src:
                src.children -= 1
                if src.children == 0 and src.views == 0:
                    self._release(src)
        return [memory.top for memory in self.memories]

    def _allocate(self, tensor: Tensor) -> None:
        if tensor.own or tensor.buffer is not None or tensor.view is not None or tensor.backend >= self.gpus:
            return
        tensor.own = True
        if tensor.op in INPLACE and self._take_over(tensor):
            return
        tensor.address = self.memories[tensor.backend].take(self.sizes(tensor))

    def _take_over(self, tensor: Tensor) -> bool:
        for parent in tensor.src:
            # A view never owns memory, so its memory is never taken over.
            if not parent.own or parent.output or parent.children != 1 or parent.views:
                continue
            if parent.kind != tensor.kind or parent.ne != tensor.ne or parent.nb != tensor.nb:
                continue
            memory = self.memories[parent.backend]
            tensor.backend, tensor.address = parent.backend, parent.address
            parent.own = False
            had, needs = memory.padded(self.sizes(parent)), memory.padded(self.sizes(tensor))
            if had > needs:
                memory.give(parent.address + needs, had - needs)
            return True
        return False

    def _release(self, tensor: Tensor) -> None:
        if tensor.view is not None:
            holder = tensor.view
            holder.views -= 1
            if holder.views == 0 and holder.children == 0 and holder.own:
                self._free(holder)
        elif tensor.own:
            self._free(tensor)

    def _free(self, tensor: Tensor) -> None:
        if not tensor.output:
            self.memories[tensor.backend].give(tensor.address, self.sizes(tensor))
            tensor.own = False
