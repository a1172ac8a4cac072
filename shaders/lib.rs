//! The WGSL shaders of selkie as text. `selkie-wgpu` embeds them without comments and adds the declarations of each variant.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// Name and text of every file.
        pub const FILES: &[(&str, &str)] = &[$(($name, include_str!($name)),)*];
    };
}

files![
    "activation.wgsl",
    "adjust.wgsl",
    "attention.wgsl",
    "attention_merge.wgsl",
    "attention_rows.wgsl",
    "attention_tile.wgsl",
    "chunk_pairs.wgsl",
    "chunk_pairs_channel.wgsl",
    "common.wgsl",
    "conv1d.wgsl",
    "conv1d_states.wgsl",
    "conv1d_tokens.wgsl",
    "embed.wgsl",
    "expert_combine.wgsl",
    "expert_matmul.wgsl",
    "expert_order.wgsl",
    "gated_delta.wgsl",
    "gated_delta_chunk.wgsl",
    "gated_delta_prepare.wgsl",
    "gather.wgsl",
    "head_matmul.wgsl",
    "latent_attention.wgsl",
    "latent_kv.wgsl",
    "logprobs.wgsl",
    "matmul_coop.wgsl",
    "matmul_odd.wgsl",
    "matmul_pack.wgsl",
    "matmul_round.wgsl",
    "matmul_rows.wgsl",
    "matmul_sum.wgsl",
    "matmul_tile.wgsl",
    "matmul_vec.wgsl",
    "read_probe.wgsl",
    "rms_norm.wgsl",
    "rope_kv.wgsl",
    "round.wgsl",
    "route.wgsl",
    "sample.wgsl",
    "selective_scan.wgsl",
    "selective_scan_chunk.wgsl",
    "selective_scan_tile.wgsl",
];

#[cfg(test)]
mod tests {
    use super::FILES;

    #[test]
    fn every_file_of_the_folder_is_listed() {
        let folder = std::fs::read_dir(env!("CARGO_MANIFEST_DIR")).expect("the crate's folder");
        let names = folder.map(|f| f.expect("an entry").file_name().into_string().expect("UTF-8"));
        let mut found: Vec<String> = names.filter(|n| n.ends_with(".wgsl")).collect();
        found.sort();
        assert_eq!(found, FILES.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }
}
