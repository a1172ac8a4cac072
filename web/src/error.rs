//! Errors for JavaScript: `Error` objects with a `code` for programs and a message for people.

use js_sys::{Error as JsError, Reflect};
use selkie_core::Error;
use wasm_bindgen::prelude::*;

/// An `Error` object with a code.
pub fn error(code: &str, message: &str) -> JsValue {
    let error = JsError::new(message);
    // Setting a property of a new object cannot fail.
    let _ = Reflect::set(&error, &"code".into(), &code.into());
    error.into()
}

/// Converts an error of core; `web/js/selkie.d.ts` documents the codes. (`From` is not possible: both types are foreign.)
pub fn from_core(e: &Error) -> JsValue {
    let (code, message) = parts(e);
    error(code, &message)
}

/// Code and message of a core error.
pub fn parts(e: &Error) -> (&'static str, String) {
    const MIB: f64 = 1048576.0;
    match e {
        Error::Io { .. } => ("missing_file", e.to_string()),
        Error::BadModel { .. } | Error::NotFinite => ("bad_model", e.to_string()),
        Error::BadRequest(_) | Error::TooLong { .. } => ("bad_request", e.to_string()),
        Error::Unsupported { .. } | Error::NoDevice { .. } => ("unsupported", e.to_string()),
        Error::OutOfMemory { what, asked, .. } => {
            let asked = *asked as f64 / MIB;
            ("out_of_memory", format!("there is not enough memory for {what}: {asked:.1} MiB were asked for"))
        }
        Error::Device { op, .. } if op == "device" => {
            ("device_lost", "the browser took the GPU away (a driver reset, sleep, or too little memory)".into())
        }
        Error::Ended(e) => parts(e),
        Error::Compile { .. } | Error::Device { .. } | Error::Panicked(_) => ("internal", e.to_string()),
    }
}
