// Included in every module, after the constants and bindings that the host generates.

const NONE: u32 = 0xffffffffu;
const CARRY: u32 = 0xffffffffu;
const FROM_DEVICE: u32 = 0x80000000u;
const PAGE: u32 = 64u;
const LOWEST: f32 = -3.4028234e38;

// Index of this workgroup. The grid wraps at 65535 groups; groups from P.groups on do nothing.
fn group_index(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.x + group.y * groups.x;
}

fn bf16x4(w: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
}

fn f16x4(w: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
}

// Eight numbers as f16.
fn halves(a: vec4<f32>, b: vec4<f32>) -> vec4<u32> {
    return vec4<u32>(pack2x16float(a.xy), pack2x16float(a.zw), pack2x16float(b.xy), pack2x16float(b.zw));
}

// What f16 holds exactly of each number: 11 bits, and nothing of numbers below its normal ones. By integers, as a compiler may
// leave out a conversion to f16 and back.
fn high_part(a: vec4<f32>) -> vec4<f32> {
    let bits = (bitcast<vec4<u32>>(a) + vec4<u32>(0x1000u)) & vec4<u32>(0xffffe000u);
    return select(bitcast<vec4<f32>>(bits), vec4<f32>(), abs(a) < vec4<f32>(0.00006103515625));
}

// The larger of `a` and the bits of x without their signs, which are in the order of what they stand for, NaN last.
fn larger(a: u32, x: vec4<f32>) -> u32 {
    let b = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    return max(a, max(max(b.x, b.y), max(b.z, b.w)));
}

// What 32 elements are multiplied with to become integers of 8 bits, and the scale of these, as in `format::round_group`. Below 2^-121
// the first would not be finite, and all integers are 0.
fn rounding(largest: u32) -> vec2<f32> {
    if largest >= 0x7f800000u {
        // Not a constant NaN, which browsers refuse.
        return vec2<f32>(0.0, bitcast<f32>(max(largest, 0x7fc00000u)));
    }
    let most = bitcast<f32>(max(largest, 0x03000000u));
    return vec2<f32>(select(127.0 / most, 0.0, largest < 0x03000000u), bitcast<f32>(largest) / 127.0);
}

fn integers(x: vec4<f32>, inverse: f32) -> vec4<i32> {
    return select(vec4<i32>(), vec4<i32>(round(x * inverse)), vec4<bool>(inverse > 0.0));
}

fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(-max(x, -80.0)));
}

// ln(1 + exp(x)) without overflow, accurate also where exp(x) is far below 1.
fn softplus(x: f32) -> f32 {
    let e = exp(-abs(x));
    let series = e * (1.0 - e * (0.5 - e * (0.33333333 - 0.25 * e)));
    return max(x, 0.0) + select(log(1.0 + e), series, e < 0.02);
}

// The complementary error function of x >= 0, relative error below 1.2e-7 (Chebyshev fit, Numerical Recipes).
fn erfc_positive(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.5 * x);
    var p = 0.17087277;
    p = p * t - 0.82215223;
    p = p * t + 1.48851587;
    p = p * t - 1.13520398;
    p = p * t + 0.27886807;
    p = p * t - 0.18628806;
    p = p * t + 0.09678418;
    p = p * t + 0.37409196;
    p = p * t + 1.00002368;
    p = p * t - 1.26551223;
    return t * exp(p - x * x);
}

fn gelu(x: f32) -> f32 {
    let half = 0.5 * erfc_positive(min(abs(x) * 0.70710678, 9.0));
    return x * select(half, 1.0 - half, x > 0.0);
}

// The functions of `Act`, numbered as the host does.
fn activate(which: u32, x: f32) -> f32 {
    switch which {
        case 1u: { return x * sigmoid(x); }
        case 2u: { return sigmoid(x); }
        case 3u: { let r = max(x, 0.0); return r * r; }
        case 4u: { return gelu(x); }
        default: { return x; }
    }
}

fn activate4(which: u32, x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(activate(which, x.x), activate(which, x.y), activate(which, x.z), activate(which, x.w));
}
