//! Preferences of the heuristic: of them all, how large a workspace may be is what it looks at.

use std::sync::LazyLock;

use phalanx_emulator_link::pointer::{Host, Out};

use crate::call::present;
use crate::handle::{Handles, value};

/// Its number among the attributes.
const MAX_WORKSPACE_BYTES: i32 = 1;

/// How many bytes a workspace may have.
pub(crate) static PREFERENCES: LazyLock<Handles<u64>> = LazyLock::new(|| Handles::new("preference", 19));

export! {
    fn cublasLtMatmulPreferenceCreate(out: Out<usize>) { present(out.set(PREFERENCES.add(0)), "pref") }
    fn cublasLtMatmulPreferenceDestroy(preference: usize) { PREFERENCES.remove(preference) }
    fn cublasLtMatmulPreferenceSetAttribute(preference: usize, attribute: i32, at: Host, bytes: usize) {
        PREFERENCES.change(preference, |bytes_max| {
            if attribute == MAX_WORKSPACE_BYTES {
                *bytes_max = value("maximal workspace", at, bytes)?;
            }
            Ok(())
        })
    }
}
