//! JavaScript values: conversion of plain objects, and values from a worker's globals.

use js_sys::{JSON, Reflect};
use serde::de::DeserializeOwned;
use wasm_bindgen::prelude::*;

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = performance, js_name = now)]
    fn performance_now() -> f64;

    #[wasm_bindgen(js_namespace = console, js_name = error)]
    fn console_error(message: &str);
}

/// Prints panics to the console before they trap.
#[wasm_bindgen(start)]
pub fn start() {
    std::panic::set_hook(Box::new(|info| console_error(&info.to_string())));
}

/// Milliseconds since the page or the worker started.
pub fn now() -> f64 {
    performance_now()
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    (js_sys::Date::now() / 1e3) as u64
}

/// A plain object or array.
pub fn object(value: &serde_json::Value) -> JsValue {
    JSON::parse(&value.to_string()).unwrap_or(JsValue::NULL)
}

/// Deserialises a plain object; functions and `undefined` in it count as absent.
pub fn parse<T: DeserializeOwned + Default>(value: &JsValue) -> Result<T, String> {
    if value.is_undefined() || value.is_null() {
        return Ok(T::default());
    }
    let text = JSON::stringify(value).ok().and_then(|text| text.as_string());
    let text = text.ok_or_else(|| "it is not a plain object".to_owned())?;
    serde_json::from_str(&text).map_err(|e| e.to_string())
}

/// An optional property.
pub fn get(of: &JsValue, name: &str) -> Option<JsValue> {
    let value = Reflect::get(of, &name.into()).ok()?;
    (!value.is_undefined() && !value.is_null()).then_some(value)
}

/// Bytes of the machine's memory as reported by the browser: rounded, and at most a few GiB.
pub fn device_memory() -> Option<u64> {
    let gib = get(&get(&js_sys::global(), "navigator")?, "deviceMemory")?.as_f64()?;
    Some((gib * f64::from(1 << 30)) as u64)
}
