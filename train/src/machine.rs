//! The machine of a run: its facts for the report, as far as the system has them, its memory and its measured peak; and the command line.

use std::path::Path;

use phalanx_kernels::peak_flops;
use phalanx_tensor::Device;

use crate::mesh_rank::MeshRank;
use crate::report::Machine;
use crate::{Config, Error, Result};

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

/// The bytes of this machine's memory, if the system has them in `/proc`.
pub(crate) fn memory_bytes() -> Option<u64> {
    Some(line("/proc/meminfo", "MemTotal")?.strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// This machine's name in its network, if the system tells it.
pub(crate) fn host() -> String {
    let read = |path: &&str| std::fs::read_to_string(path).ok();
    let file = ["/proc/sys/kernel/hostname", "/etc/hostname"].iter().find_map(read);
    let set = || ["HOSTNAME", "COMPUTERNAME"].iter().find_map(|name| std::env::var(name).ok());
    file.or_else(set).map_or_else(|| "this host".into(), |name| name.trim().into())
}

/// The text after the colon of the file's line that begins with `start`.
fn line(path: &str, start: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| Some(line.strip_prefix(start)?.split_once(':')?.1.trim().to_string()))
}

/// The commit that is checked out in a folder or one above it. Changes since that commit do not show.
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

/// The peak of all ranks together in the run's dtype, in floating-point operations a second. All ranks measure at the same time. On a CPU
/// it is the rate of the fused multiply-add instruction between registers. If the ranks of one process have more threads than there are
/// cores, the sum is reduced by that ratio. All ranks call it.
pub(crate) fn peak(mesh_rank: &MeshRank, config: &Config) -> Result<f64> {
    let one_process = mesh_rank.is_one_process()?;
    let all = mesh_rank.sum(peak_flops(config.dtype, mesh_rank.device)?)?;
    let Device::Cpu(_) = mesh_rank.device else { return Ok(all) };
    let threads = mesh_rank.sum(mesh_rank.device.pool()?.threads() as f64)?;
    let cores = std::thread::available_parallelism().map_or(threads, |cores| cores.get() as f64);
    Ok(if one_process { all * (cores / threads).min(1.0) } else { all })
}

/// Refuses allocations, given by name and bytes, that together need more memory than this machine has. If the system does not report its
/// memory, everything fits.
///
/// # Errors
/// The allocations' bytes and the machine's.
pub fn check_memory(allocations: &[(&str, f64)]) -> Result<()> {
    let Some(available) = memory_bytes().map(|bytes| bytes as f64) else { return Ok(()) };
    let all: f64 = allocations.iter().map(|(_, bytes)| bytes).sum();
    if all <= available {
        return Ok(());
    }
    let listed: Vec<String> = allocations.iter().map(|(what, bytes)| format!("{what} {bytes:.2e}")).collect();
    Err(Error::Config(format!(
        "wanted bytes for {}, and this machine has {available:.2e}",
        listed.join(", ")
    )))
}

/// The command line that the run was started with, quoted for a shell.
pub(crate) fn command() -> String {
    std::env::args().map(quoted).collect::<Vec<_>>().join(" ")
}

/// A word of a command line as a shell reads it.
fn quoted(word: String) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
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

    #[test]
    fn words_are_quoted_where_a_shell_would_cut_them() {
        assert_eq!(
            [quoted("--lr=1e-3".into()), quoted("a b's".into()), quoted(String::new())],
            ["--lr=1e-3", "'a b'\\''s'", "''"]
        );
    }
}
