//! Inputs and events that once stopped the program or lost its user's work. Each ends in an error message, and complete
//! answers are kept.

#[path = "attack/batch.rs"]
mod batch;
mod binary;
#[path = "attack/files.rs"]
mod files;
#[path = "attack/web.rs"]
mod web;
