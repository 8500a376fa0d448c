//! Programs that tests start, built if need be: `phalanx-launch` beside the test.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// `cargo build` as on a command line: without what Cargo tells a test of its package, a change of which makes some build scripts (that of
/// `ring`) run again. `PHALANX_CARGO_CONFIG` is the file of a `--config`.
pub fn cargo_build() -> Command {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    let told = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(told)) {
        build.env_remove(name);
    }
    if let Some(config) = env::var_os("PHALANX_CARGO_CONFIG") {
        build.arg("--config").arg(config);
    }
    build
}

/// The launcher in the profile of this test.
pub fn launcher() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let test = env::current_exe().unwrap();
        let folder = test.parent().and_then(Path::parent).unwrap();
        let profile = match folder.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            named => named,
        };
        let mut build = cargo_build();
        build.args(["--package", "phalanx-launch", "--profile", profile]);
        build.arg("--target-dir").arg(folder.parent().unwrap());
        assert!(build.status().unwrap().success(), "the launcher builds");
        folder.join("phalanx-launch")
    })
}
