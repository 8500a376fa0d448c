//! Trains a GPT on text and lets it write.

mod args;
mod metrics;
mod plot;
mod text;

fn main() {}
