//! Kernel parameters: one declaration per kernel, from which the kernel's parameter list is printed and the words of a launch
//! are written.
//!
//! [`Spec::text`](crate::spec::Spec::text) defines `PARAMETERS` as the declarations in order, and the kernel's signature is
//! `ENTRY(PARAMETERS)`. Parameters stay positional: they lie in constant memory as the members of a structure would.

use crate::launch::Args;

mod value;

pub use value::{At, Kind, Parameter, Rows, StepWords};

use value::Value;

/// The values of a kernel's parameters.
pub trait Arguments {
    /// The declaration.
    const PARAMETERS: &'static [Parameter];
    /// The values in the order of the declaration.
    fn args(&self) -> Args;
}

/// Declares the parameters of a kernel: `name: host type "element type"`.
macro_rules! arguments {
    ($($(#[$doc:meta])* $kernel:ident { $($name:ident: $ty:ty $(= $element:literal)?,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            #[allow(missing_docs, reason = "fields are described where kernels use them")]
            pub struct $kernel { $(pub $name: $ty,)* }

            impl Arguments for $kernel {
                const PARAMETERS: &'static [Parameter] = &[$(Parameter {
                    name: stringify!($name),
                    kind: <$ty as Value>::KIND,
                    element: concat!($($element)?),
                },)*];

                fn args(&self) -> Args {
                    let args = Args::with_capacity(Self::PARAMETERS.len());
                    $(let args = self.$name.add_to(args);)*
                    args
                }
            }
        )*
    };
}

arguments! {
    /// Of `empty.cu`.
    Empty {}
    /// Of `fill.cu`.
    Fill {
        out: At = "out_t",
        n: u64,
        seed: u32,
        scale: f32,
    }
    /// Of `copy_rows.cu`.
    CopyRows {
        tensors: At = "const u64",
        row: u64,
        first: u64,
        bytes: u64,
        packed: At = "u8",
    }
    /// Of `codes_arrange.cu`; `stored`: `n` rows of `row_bytes` bytes.
    CodesArrange {
        stored: At = "const u8",
        row_bytes: u64,
        n: u64,
        out: At = "u8",
    }
    /// Of `codes_decode.cu`; `n`: rows of w.
    CodesDecode {
        w: At = "const u8",
        n: u64,
        out: Rows = "out_t",
    }
    /// Of `codes_rows.cu`; `n`: rows of w.
    CodesRows {
        w: At = "const u8",
        n: u64,
        codes: At = "u8",
        scales: At = "float",
    }
    /// Of `embed.cu` and `embed_codes.cu`; `first` and `rows`: the ids in this block of the table.
    Embed {
        st: StepWords,
        last: At = "const u32",
        table: Rows = "const table_t",
        first: u32,
        rows: u32,
        out: Rows = "out_t",
        scale: f32,
    }
    /// Of `gather.cu`.
    Gather {
        st: StepWords,
        x: Rows = "const x_t",
        out: Rows = "out_t",
    }
    /// Of `activation.cu`.
    Activation {
        gate: Rows = "const gate_t",
        up: Rows = "const up_t",
        row_gate: Rows = "const row_gate_t",
        out: Rows = "out_t",
    }
    /// Of `round.cu`.
    Round {
        x: Rows = "const x_t",
        out: Rows = "x_t",
    }
    /// Of `round_codes.cu`.
    RoundCodes {
        x: Rows = "const x_t",
        codes: At = "u8",
        scales: At = "float",
    }
    /// Of `rms_norm.cu`; `units`: rows times groups.
    RmsNorm {
        x: Rows = "x_t",
        add: Rows = "const add_t",
        add_scale: f32,
        weight: At = "const float",
        gate: Rows = "const gate_t",
        out: Rows = "out_t",
        eps: f32,
        units: u32,
    }
    /// Of `all_reduce.cu` and `all_gather.cu`.
    Exchange {
        areas: At = "const u64",
        x: Rows = "const x_t",
        out: Rows = "out_t",
        rows: u32,
    }
    /// Of `rank_norm.cu`.
    RankNorm {
        areas: At = "const u64",
        x: Rows = "const x_t",
        weight: At = "const float",
        gate: Rows = "const gate_t",
        out: Rows = "out_t",
        eps: f32,
        rows: u32,
    }
    /// Of `rope_kv.cu`; the stride of the pools is that of a page.
    RopeKv {
        st: StepWords,
        q: Rows = "const q_t",
        k: Rows = "const k_t",
        v: Rows = "const v_t",
        norm: At = "const float",
        eps: f32,
        inv_freq: At = "const float",
        q_out: Rows = "q_out_t",
        k_pages: Rows = "kv_t",
        v_pages: Rows = "kv_t",
    }
    /// Of `route.cu`.
    Route {
        st: StepWords,
        logits: Rows = "const float",
        bias: At = "const float",
        ids: Rows = "u32",
        weights: Rows = "float",
        sum_eps: f32,
        scale: f32,
    }
    /// Of `adjust.cu`; `mask` and `counts`: offsets in a lane's rules.
    Adjust {
        st: StepWords,
        logits: Rows = "const float",
        vocab: u32,
        rules: Rows = "const u32",
        mask: u32,
        counts: u32,
        seen: Rows = "const u32",
        out: Rows = "float",
    }
    /// Of `logprobs.cu`; `counts`: offset in a lane's rules.
    Logprobs {
        st: StepWords,
        logits: Rows = "const float",
        vocab: u32,
        ids: At = "const u32",
        rules: Rows = "u32",
        counts: u32,
        report: Rows = "float",
    }
    /// Of `sample.cu`.
    Sample {
        st: StepWords,
        logits: Rows = "const float",
        vocab: u32,
        lanes: Rows = "const u32",
        seen: Rows = "u32",
        last: At = "u32",
        ids: At = "u32",
    }
    /// Of `attention.cu`.
    Attention {
        st: StepWords,
        q: Rows = "const q_t",
        k_pages: Rows = "const kv_t",
        v_pages: Rows = "const kv_t",
        out: Rows = "out_t",
        partial: At = "float",
        scale: f32,
    }
    /// Of `attention_combine.cu`.
    AttentionCombine {
        st: StepWords,
        partial: At = "const float",
        out: Rows = "out_t",
    }
    /// Of `head_matmul.cu` and `head_matmul_tile.cu`; `tokens`: rows of x.
    HeadMatmul {
        x: Rows = "const x_t",
        w: At = "const float",
        tokens: i32,
        out: Rows = "out_t",
    }
    /// Of `head_matmul_mma.cu`; `tokens`: rows of x.
    HeadMatmulMma {
        x: Rows = "const bf16",
        w: At = "const float",
        tokens: i32,
        out: Rows = "bf16",
    }
    /// Of `latent_kv.cu`; the stride of the pools is that of a page.
    LatentKv {
        st: StepWords,
        kv: Rows = "const kv_t",
        weight: At = "const float",
        eps: f32,
        k_pages: Rows = "page_t",
        v_pages: Rows = "page_t",
    }
    /// Of `latent_attention.cu`; the stride of the pools is that of a page.
    LatentAttention {
        st: StepWords,
        q: Rows = "const q_t",
        queries: Rows = "const q_t",
        k_pages: Rows = "const page_t",
        v_pages: Rows = "const page_t",
        out: Rows = "out_t",
        partial: At = "float",
        scale: f32,
    }
    /// Of `latent_attention_tile.cu` and `latent_attention_wgmma.cu`; the stride of the pools is that of a page.
    LatentAttentionTile {
        st: StepWords,
        q: Rows = "const bf16",
        queries: Rows = "const bf16",
        k_pages: Rows = "const page_t",
        v_pages: Rows = "const page_t",
        out: Rows = "bf16",
        partial: At = "float",
        scale: f32,
    }
    /// Of `attention_decode.cu`; `tickets`: a u32 of zero for every multiprocessor, left as it was.
    AttentionDecode {
        st: StepWords,
        q: Rows = "const bf16",
        k_pages: Rows = "const kv_t",
        v_pages: Rows = "const kv_t",
        out: Rows = "out_t",
        partial: At = "float",
        tickets: At = "u32",
        scale: f32,
    }
    /// Of `attention_prefill.cu` and `attention_wgmma.cu`.
    AttentionTiles {
        st: StepWords,
        q: Rows = "const bf16",
        k_pages: Rows = "const kv_t",
        v_pages: Rows = "const kv_t",
        out: Rows = "bf16",
        scale: f32,
    }
    /// Of `conv1d.cu`; `state_unwritten` as in [`Hazards`](crate::plan::Hazards).
    Conv1d {
        st: StepWords,
        x: Rows = "const x_t",
        factor: At = "const x_t",
        mid: At = "x_t",
        weight: Rows = "const float",
        pool: Rows = "pool_t",
        out: Rows = "out_t",
        state_unwritten: u32,
    }
    /// Of `selective_scan.cu`; `state_unwritten` as in [`Hazards`](crate::plan::Hazards).
    SelectiveScan {
        st: StepWords,
        x: Rows = "const x_t",
        b: Rows = "const b_t",
        cc: Rows = "const c_t",
        dt: Rows = "const dt_t",
        par: Rows = "const float",
        pool: Rows = "pool_t",
        y: Rows = "y_t",
        dt_min: f32,
        dt_max: f32,
        state_unwritten: u32,
    }
    /// Of `selective_scan_chunk.cu` and `selective_scan_channel.cu`.
    SelectiveScanChunk {
        st: StepWords,
        x: Rows = "const bf16",
        b: Rows = "const bf16",
        cc: Rows = "const bf16",
        dt: Rows = "const bf16",
        par: Rows = "const float",
        pool: Rows = "pool_t",
        y: Rows = "bf16",
        dt_min: f32,
        dt_max: f32,
    }
    /// Of `gated_delta.cu`; `state_unwritten` as in [`Hazards`](crate::plan::Hazards).
    GatedDelta {
        st: StepWords,
        q: Rows = "const q_t",
        k: Rows = "const k_t",
        v: Rows = "const v_t",
        a: Rows = "const a_t",
        b: Rows = "const b_t",
        par: Rows = "const float",
        pool: Rows = "pool_t",
        out: Rows = "out_t",
        beta_scale: f32,
        state_unwritten: u32,
    }
    /// Of `gated_delta_channel.cu`.
    GatedDeltaChannel {
        st: StepWords,
        q: Rows = "const q_t",
        k: Rows = "const k_t",
        v: Rows = "const v_t",
        a: Rows = "const a_t",
        b: Rows = "const b_t",
        par: Rows = "const float",
        pool: Rows = "pool_t",
        out: Rows = "out_t",
        beta_scale: f32,
    }
    /// Of `gated_delta_prepare.cu` and `gated_delta_prepare_channel.cu`.
    GatedDeltaPrepare {
        st: StepWords,
        q: Rows = "const bf16",
        k: Rows = "const bf16",
        a: Rows = "const bf16",
        b: Rows = "const bf16",
        par: Rows = "const float",
        scratch: At = "u8",
        beta_scale: f32,
    }
    /// Of `gated_delta_chunk.cu`.
    GatedDeltaChunk {
        st: StepWords,
        q: Rows = "const bf16",
        k: Rows = "const bf16",
        v: Rows = "const bf16",
        scratch: At = "const u8",
        pool: Rows = "pool_t",
        out: Rows = "bf16",
    }
    /// Of `gemv.cu`, `matmul_skinny_bulk.cu` and `matmul_codes.cu`: a product, the op before it (`first`, `second`, `norm_weight`, `eps`) and the
    /// convolution after it (`ints` and on). `n`: rows of w.
    FusedProduct {
        x: Rows = "bf16",
        w: Rows = "const bf16",
        n: i32,
        columns: At = "const float",
        bias: At = "const float",
        out: Rows = "out_t",
        scale: f32,
        first: At = "const bf16",
        second: At = "const bf16",
        norm_weight: At = "const float",
        eps: f32,
        ints: At = "const u32",
        conv_weight: Rows = "const float",
        pool: Rows = "pool_t",
        conv_out: At = "conv_t",
        state_unwritten: u32,
    }
    /// More of `matmul_skinny_bulk.cu`: another product. `pair_n`: rows of its w.
    OtherProduct {
        pair_x: Rows = "bf16",
        pair_w: Rows = "const bf16",
        pair_n: i32,
        pair_out: Rows = "pair_t",
    }
    /// Of `matmul_codes_wgmma.cu`; `n`: rows of w; `tickets`: a u32 of zero for every block, left as it was; `partial`: the
    /// sums of a tile for every block.
    MatmulCodesWgmma {
        x: Rows = "const bf16",
        x_scales: At = "const float",
        w: At = "const u8",
        n: i32,
        columns: At = "const float",
        bias: At = "const float",
        out: Rows = "out_t",
        scale: f32,
        partial: At = "float",
        tickets: At = "u32",
    }
    /// Of `matmul_skinny.cu`; `n`: rows of w.
    MatmulSkinny {
        x: Rows = "const bf16",
        w: Rows = "const bf16",
        n: i32,
        columns: At = "const float",
        bias: At = "const float",
        out: Rows = "out_t",
        scale: f32,
    }
    /// Of `matmul_plain.cu`; `m` and `n`: rows of x and of w.
    MatmulPlain {
        x: Rows = "const x_t",
        w: Rows = "const w_t",
        m: i32,
        n: i32,
        columns: At = "const float",
        bias: At = "const float",
        out: Rows = "out_t",
        scale: f32,
    }
    /// Of `matmul_bias.cu`; `m`: rows of out.
    MatmulBias {
        m: i32,
        columns: At = "const float",
        bias: At = "const float",
        out: Rows = "out_t",
    }
    /// Of `expert_combine.cu`.
    ExpertCombine {
        products: At = "const product_t",
        ids: Rows = "const u32",
        weights: Rows = "const float",
        out: Rows = "out_t",
        scale: f32,
    }
    /// Of `expert_grouped.cu`; the stride of w is that of an expert.
    ExpertGrouped {
        x: Rows = "const bf16",
        w: Rows = "const bf16",
        tiles: At = "const u32",
        order: At = "const u32",
        out: Rows = "out_t",
    }
    /// Of `expert_grouped_codes.cu`; the stride of w is that of an expert, in bytes.
    ExpertGroupedCodes {
        x: Rows = "const bf16",
        w: Rows = "const u8",
        tiles: At = "const u32",
        order: At = "const u32",
        out: Rows = "out_t",
    }
    /// Of `expert_matmul.cu` and `expert_codes.cu`; the stride of w is that of an expert, `first` and `experts` are those in w, `n` rows each.
    ExpertMatmul {
        x: Rows = "const x_t",
        w: Rows = "const w_t",
        first: u32,
        experts: u32,
        n: i32,
        ids: Rows = "const u32",
        out: Rows = "out_t",
    }
    /// Of `expert_ring_codes.cu`; the stride of w is that of an expert, in bytes. `tables_complete`: the tables are written when the
    /// kernel starts.
    ExpertRingCodes {
        x: Rows = "const bf16",
        w: Rows = "const u8",
        tiles: At = "const u32",
        order: At = "const u32",
        out: Rows = "out_t",
        mid: Rows = "mid_t",
        tables_complete: u32,
    }
    /// Of `expert_sort.cu`.
    ExpertSort {
        ids: Rows = "const u32",
        pairs: u32,
        tiles: At = "u32",
        order: At = "u32",
    }
    /// Of `expert_stream.cu`; the stride of w is that of an expert, `inputs_complete` as in
    /// [`Hazards`](crate::plan::Hazards).
    ExpertStream {
        x: Rows = "const bf16",
        w: Rows = "const bf16",
        experts: u32,
        ids: Rows = "u32",
        out: Rows = "out_t",
        mid: Rows = "mid_t",
        weights: Rows = "float",
        scale: f32,
        logits: At = "const float",
        bias: At = "const float",
        sum_eps: f32,
        route_scale: f32,
        inputs_complete: u32,
    }
    /// Of `expert_wgmma.cu`; the stride of w is that of an expert.
    ExpertWgmma {
        x: Rows = "const bf16",
        w: Rows = "const bf16",
        tiles: At = "const u32",
        order: At = "const u32",
        out: Rows = "bf16",
        mid: Rows = "bf16",
    }
}

/// Of `matmul_skinny_bulk.cu`.
#[derive(Clone, Copy, Debug)]
pub struct ProductPair {
    /// A product with the ops around it.
    pub product: FusedProduct,
    /// Another product, if there is one.
    pub other: OtherProduct,
}

impl Arguments for ProductPair {
    const PARAMETERS: &'static [Parameter] = &{
        let (first, more) = (FusedProduct::PARAMETERS, OtherProduct::PARAMETERS);
        let mut all = [first[0]; FusedProduct::PARAMETERS.len() + OtherProduct::PARAMETERS.len()];
        let mut i = 0;
        while i < all.len() {
            all[i] = if i < first.len() { first[i] } else { more[i - first.len()] };
            i += 1;
        }
        all
    };

    fn args(&self) -> Args {
        self.product.args().and(&self.other.args())
    }
}
