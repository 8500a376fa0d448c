//! [`Gathered`]: while it lives, the model holds all its values.

use std::sync::Arc;

use super::core::Core;

/// See [`Zero::gathered`](super::Zero::gathered).
#[must_use = "values are freed when it is dropped"]
pub struct Gathered(pub(super) Arc<Core>);

impl Drop for Gathered {
    fn drop(&mut self) {
        // Freeing waits for nothing that was not waited for, and an empty stand-in always fits.
        let _ = self.0.release();
    }
}
