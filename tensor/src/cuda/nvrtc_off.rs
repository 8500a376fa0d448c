//! What stands for the compiler where this crate was built without the feature `cuda`.

use super::{Image, Target};

/// Nothing is compiled.
///
/// # Errors
/// Always.
pub fn compile(name: &str, _: &str, target: Target) -> Result<Image, String> {
    Err(format!("{name} for {target}: this program was built without the feature `cuda`"))
}

/// None.
pub fn compiled(_: usize) -> Option<(String, String)> {
    None
}
