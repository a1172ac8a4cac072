// Row `row` of each of several tensors to the bytes from `first` on of a value, in which the rows lie one after the other, or back.
// `packed` has `bytes` bytes of the value. Three words a tensor: address, bytes of a row, where the row lies in the value.
// Grid (any, tensors). SAVE: to the value.

DEV void copy(u8 *to, const u8 *from, u64 n) {
    u64 i = blockIdx.x * 256ull + threadIdx.x, step = gridDim.x * 256ull;
    if ((((u64)to | (u64)from | n) & 15) == 0) {
        for (; i < n / 16; i += step) ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    } else {
        // Elements have two bytes or more.
        for (; i < n / 2; i += step) ((u16 *)to)[i] = ((const u16 *)from)[i];
    }
}

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    const u64 *tensor = tensors + 3 * blockIdx.y;
    u64 at = tensor[2], end = at + tensor[1];
    u64 from = at > first ? at : first, to = end < first + bytes ? end : first + bytes;
    if (from >= to) return;
    u8 *inner = (u8 *)(tensor[0] + row * tensor[1] + (from - at)), *outer = packed + (from - first);
    if (SAVE) copy(outer, inner, to - from);
    else copy(inner, outer, to - from);
}
