//! The demo model that is part of the program.

use selkie_core::source::Embedded;

/// The model's files, used in place in the executable. They may have any alignment.
pub const DEMO: Embedded = Embedded { label: "the embedded demo model", files: &FILES };

/// A static, so that there is one copy of them wherever [`DEMO`] is used.
static FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../models/demo/config.json")),
    ("generation_config.json", include_bytes!("../models/demo/generation_config.json")),
    ("model.gguf", include_bytes!("../models/demo/model.gguf")),
    ("tokenizer.json", include_bytes!("../models/demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../models/demo/tokenizer_config.json")),
];
