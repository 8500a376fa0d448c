//! What stands for cuBLASLt where this crate was built without the feature `cuda`: it is never found, so none of the calls
//! is ever made.
#![allow(unsafe_code)]

use super::driver::{CUstream, Failure};
use super::product::Form;

/// There is none.
pub(super) struct Handle;

/// There is none.
pub(super) struct Plan {
    pub(super) workspace_bytes: usize,
}

/// Where a product's tensors are.
#[allow(dead_code)] // nobody reads them here
pub(super) struct Addresses {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) c: u64,
    pub(super) bias: u64,
    pub(super) before: u64,
    pub(super) workspace: u64,
}

impl Handle {
    pub(super) fn new() -> Result<Handle, Failure> {
        Err(Failure { code: 100, text: "built without the feature `cuda`".into() })
    }

    pub(super) fn plan(&self, _: &Form, _: &Addresses, _: usize) -> Result<Option<Plan>, Failure> {
        Ok(None)
    }

    /// # Safety
    /// None: it is never called.
    pub(super) unsafe fn run(&self, _: &Form, _: &Plan, _: &Addresses, _: CUstream) -> Result<(), Failure> {
        Ok(())
    }
}
