//! Inputs and events that once took the program down or cost its user work. Each ends in an error with a sentence, and what
//! was complete is kept.

#[path = "attack/batch.rs"]
mod batch;
mod binary;
#[path = "attack/files.rs"]
mod files;
#[path = "attack/web.rs"]
mod web;
