//! The CUDA kernels of selkie as text. `selkie-cuda` compiles them at run time; nothing here needs a GPU.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// Name and text of every file.
        pub const FILES: &[(&str, &str)] = &[$(($name, include_str!($name)),)*];
    };
}

files![
    "activation.cu",
    "adjust.cu",
    "all_gather.cu",
    "all_reduce.cu",
    "attention.cu",
    "attention_combine.cu",
    "attention_decode.cu",
    "attention_prefill.cu",
    "attention_wgmma.cu",
    "codes.cuh",
    "codes_arrange.cu",
    "codes_decode.cu",
    "codes_rows.cu",
    "common.cuh",
    "conv1d.cu",
    "copy_rows.cu",
    "embed.cu",
    "embed_codes.cu",
    "empty.cu",
    "expert_codes.cu",
    "expert_combine.cu",
    "expert_grouped.cu",
    "expert_grouped_codes.cu",
    "expert_matmul.cu",
    "expert_ring_codes.cu",
    "expert_sort.cu",
    "expert_stream.cu",
    "expert_stream_codes.cu",
    "expert_wgmma.cu",
    "fill.cu",
    "gated_delta.cu",
    "gated_delta_channel.cu",
    "gated_delta_chunk.cu",
    "gated_delta_prepare.cu",
    "gated_delta_prepare_channel.cu",
    "gated_delta_unit.cuh",
    "gather.cu",
    "gemv.cu",
    "head_matmul.cu",
    "head_matmul_mma.cu",
    "head_matmul_tile.cu",
    "latent_attention.cu",
    "latent_attention_tile.cu",
    "latent_attention_wgmma.cu",
    "latent_kv.cu",
    "logprobs.cu",
    "matmul_bias.cu",
    "matmul_codes.cu",
    "matmul_codes_wgmma.cu",
    "matmul_plain.cu",
    "matmul_skinny.cu",
    "matmul_skinny_bulk.cu",
    "prologue_epilogue.cuh",
    "rank_norm.cu",
    "ranks.cuh",
    "rms_norm.cu",
    "rope_kv.cu",
    "round.cu",
    "round.cuh",
    "round_codes.cu",
    "route.cu",
    "route.cuh",
    "sample.cu",
    "selective_scan.cu",
    "selective_scan_channel.cu",
    "selective_scan_chunk.cu",
    "wgmma.cuh",
];

/// The text of a file. Evaluated in a constant, an unknown name is a compile error.
///
/// # Panics
/// If no file has this name.
pub const fn text(name: &str) -> &'static str {
    let mut i = 0;
    while i < FILES.len() {
        if equal(FILES[i].0.as_bytes(), name.as_bytes()) {
            return FILES[i].1;
        }
        i += 1;
    }
    panic!("no kernel file has this name");
}

/// `a == b`, which constants cannot say yet.
const fn equal(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

#[cfg(test)]
mod tests {
    use super::FILES;

    #[test]
    fn every_file_of_the_folder_is_listed() {
        let folder = std::fs::read_dir(env!("CARGO_MANIFEST_DIR")).expect("the crate's folder");
        let names = folder.map(|f| f.expect("an entry").file_name().into_string().expect("UTF-8"));
        let mut found: Vec<String> = names.filter(|n| n.ends_with(".cu") || n.ends_with(".cuh")).collect();
        found.sort();
        assert_eq!(found, FILES.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }
}
