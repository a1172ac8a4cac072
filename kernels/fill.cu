// Random values in [-scale, scale), from a hash of (seed, index): weights for benches, made on the device.
// out_t.

DEV u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull) {
        u32 h = mix((u32)i ^ mix((u32)(i >> 32) + seed));
        out[i] = from_f32<out_t>(((float)(h >> 8) * (1.f / 8388608.f) - 1.f) * scale);
    }
}
