// Looks at the first visible keys of a mask before attention uses them: query t's is from 0 to t, and not below that of the
// query before.
//
// One thread a query, of heads whose numbers are their own. What is wrong goes into the device's record of faults; of
// two that decrease the earlier one is named, which is to be at most the later.

extern "C" __global__ void __launch_bounds__(256) attention_first_keys(const __grid_constant__ Problem p, Faults* faults,
                                                                       u32 code) {
    const Place at = place_of_block(p.heads, blocks_of(p.queries, 256));
    if ((at.head > 0 && p.mask_head == 0) || (at.item > 0 && p.mask_batch == 0)) return;
    const int query = at.block * 256 + threadIdx.x;
    if (query >= p.queries) return;
    const i64* first = (const i64*)p.mask + at.item * p.mask_batch + at.head * p.mask_head + query * p.mask_row;
    const i64 item = ((i64)at.item * p.heads + at.head) * p.queries + query;
    if (*first < 0 || *first > query) fault(faults, code, item, *first, query + 1);
    else if (query > 0 && first[-p.mask_row] > *first) fault(faults, code, item - 1, first[-p.mask_row], *first + 1);
}
