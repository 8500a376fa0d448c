//! What a run ran on, for its report: as far as the system tells.

use std::path::Path;

use phalanx_tensor::Device;

use crate::Config;
use crate::report::Machine;

/// This machine, and the GPU if the run has one.
pub(crate) fn machine(config: &Config) -> Machine {
    let gpu = match config.device {
        Device::Cuda(_) => config.device.gpu().map_or_else(|_| String::new(), |gpu| gpu.name().to_string()),
        _ => String::new(),
    };
    Machine {
        cpu: line("/proc/cpuinfo", "model name").unwrap_or_default(),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        isa: phalanx_kernels::checked_isa().map_or_else(|_| String::new(), |isa| isa.name().to_string()),
        memory_bytes: memory_bytes().unwrap_or(0),
        os: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        gpu,
        version: format!("Phalanx {}", env!("CARGO_PKG_VERSION")),
        commit: std::env::current_dir().ok().and_then(|here| commit(&here)).unwrap_or_default(),
        ..Machine::default()
    }
}

/// The bytes of this machine's memory, where the system tells.
pub(crate) fn memory_bytes() -> Option<u64> {
    Some(line("/proc/meminfo", "MemTotal")?.strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// What stands behind the colon of a file's line.
fn line(path: &str, start: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| Some(line.strip_prefix(start)?.split_once(':')?.1.trim().to_string()))
}

/// The commit that is checked out in a folder or one above it. What was changed since is not seen.
fn commit(folder: &Path) -> Option<String> {
    let read = |path: &Path| std::fs::read_to_string(path).ok().map(|text| text.trim().to_string());
    let git = folder.ancestors().map(|folder| folder.join(".git")).find(|git| git.exists())?;
    // A further working tree has a file that names its own folder, whose branches are those of the first.
    let own = match read(&git) {
        Some(text) => folder.join(text.strip_prefix("gitdir:")?.trim()),
        None => git,
    };
    let shared = read(&own.join("commondir")).map_or_else(|| own.clone(), |path| own.join(path));
    let head = read(&own.join("HEAD"))?;
    let Some(branch) = head.strip_prefix("ref:").map(str::trim) else { return Some(head) };
    let loose = [&own, &shared].into_iter().find_map(|folder| read(&folder.join(branch)));
    let packed = || {
        let all = read(&shared.join("packed-refs"))?;
        all.lines().find_map(|line| line.strip_suffix(branch).map(|id| id.trim().to_string()))
    };
    let id = loose.or_else(packed)?;
    let name = branch.strip_prefix("refs/heads/").unwrap_or(branch);
    Some(format!("{} ({name})", id.chars().take(12).collect::<String>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_found_from_below_and_where_refs_are_packed() {
        let folder = std::env::temp_dir().join(format!("phalanx-commit-{}", std::process::id()));
        let (git, below) = (folder.join(".git"), folder.join("a/b"));
        std::fs::create_dir_all(git.join("refs/heads")).unwrap();
        std::fs::create_dir_all(&below).unwrap();
        std::fs::write(git.join("HEAD"), "ref: refs/heads/main\n").unwrap();
        assert_eq!(commit(&below), None);
        std::fs::write(git.join("packed-refs"), "# packed\n0123456789abcdef refs/heads/main\n").unwrap();
        assert_eq!(commit(&below).unwrap(), "0123456789ab (main)");
        std::fs::write(git.join("refs/heads/main"), "fedcba9876543210\n").unwrap();
        assert_eq!(commit(&below).unwrap(), "fedcba987654 (main)");
        std::fs::write(git.join("HEAD"), "00ff\n").unwrap();
        assert_eq!(commit(&below).unwrap(), "00ff");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
