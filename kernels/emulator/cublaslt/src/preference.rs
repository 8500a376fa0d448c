//! Preferences of the heuristic: it has one algorithm without a workspace, so none of them changes anything.

use std::sync::LazyLock;

use phalanx_emulator_link::pointer::{Host, Out};

use crate::call::present;
use crate::handle::Handles;

static PREFERENCES: LazyLock<Handles<()>> = LazyLock::new(|| Handles::new("preference", 19));

export! {
    fn cublasLtMatmulPreferenceCreate(out: Out<usize>) { present(out.set(PREFERENCES.add(())), "pref") }
    fn cublasLtMatmulPreferenceDestroy(preference: usize) { PREFERENCES.remove(preference) }
    fn cublasLtMatmulPreferenceSetAttribute(preference: usize, attribute: i32, at: Host, bytes: usize) {
        PREFERENCES.get(preference)
    }
}
