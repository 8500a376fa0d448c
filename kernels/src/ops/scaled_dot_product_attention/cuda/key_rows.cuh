// Scores of a warp's keys, down, and of queries, across, made again in the backward pass: for products of warps and of warpgroups
// alike.

// Products become probabilities: of queries from number `query` on, and keys from `key` on.
template <int M, int N>
DEVICE void probabilities(f32 (&s)[M][N][4], const Problem& p, const Place& at, const f32* logsumexp, int query, int key) {
    const int g = lane_number() / 4, t = lane_number() % 4;
    const Score score(p);
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *(const float2*)(logsumexp + n * 8 + 2 * t);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = score.probability(s[m][n][i], i % 2 ? two.y : two.x, p, at, query + n * 8 + 2 * t + i % 2,
                                               key + m * 16 + i / 2 * 8 + g);
    }
    if (p.causal && key + 16 * M > query) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int hidden = key + m * 16 + i / 2 * 8 + g - query - 2 * t - i % 2;  // queries before this
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (n * 8 < hidden) s[m][n][i] = 0;
            }
    }
    if (CUT && key < first_key(p, at.item, at.head, query + N * 8 - 1)) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int start = first_key(p, at.item, at.head, query + n * 8 + 2 * t + i) - key - g;
#pragma unroll
                for (int m = 0; m < M; m++) {
                    if (m * 16 < start) s[m][n][i] = 0;
                    if (m * 16 + 8 < start) s[m][n][2 + i] = 0;
                }
            }
    }
}

// The number of the first query that sees none of the keys before `end`, of any of a key head's query heads.
DEVICE int queries_seeing(const Problem& p, const Place& at, int end) {
    if (!CUT) return p.queries;
    int most = 0;
#pragma unroll 1
    for (int member = 0; member < (p.mask_head == 0 ? 1 : p.group); member++) {
        int low = most, high = p.queries;
#pragma unroll 1
        while (low < high) {
            const int middle = low + (high - low) / 2;
            if (first_key(p, at.item, at.head * p.group + member, middle) < end) low = middle + 1;
            else high = middle;
        }
        most = low;
    }
    return most;
}

// dy vᵀ becomes ds.
template <int M, int N> DEVICE void differentiate(f32 (&ds)[M][N][4], const f32 (&s)[M][N][4], const f32* delta) {
    const int t = lane_number() % 4;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *(const float2*)(delta + n * 8 + 2 * t);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) ds[m][n][i] = s[m][n][i] * (ds[m][n][i] - (i % 2 ? two.y : two.x));
    }
}
