//! Tokens in files, windows over them, and everything that can be wrong with a file.

mod indexed;
mod raw;
mod windows;

use std::path::Path;

use super::super::scratch::Folder;
use super::{IndexedTokens, Tokens};
use crate::Result;

fn all(tokens: &impl Tokens) -> Vec<u32> {
    let mut to = vec![0; tokens.len() as usize];
    tokens.copy(0, &mut to).unwrap();
    to
}

fn values(tensor: &phalanx_tensor::Tensor) -> Vec<i64> {
    tensor.to_vec().unwrap()
}

/// A pair of files of these documents, each some sequences.
fn write_indexed(prefix: &Path, vocabulary: u32, documents: &[&[&[u32]]]) -> Result<u64> {
    IndexedTokens::write(prefix, vocabulary, |writer| {
        for document in documents {
            document.iter().try_for_each(|sequence| writer.sequence(sequence))?;
            writer.end_document();
        }
        Ok(())
    })
}

const DOCUMENTS: [&[&[u32]]; 3] = [&[&[1, 2], &[3]], &[&[4, 5, 6]], &[&[7], &[], &[8, 9]]];
