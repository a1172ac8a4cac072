//! The wgpu backend of selkie.
