//! [`doctor`]: what a machine has of CUDA, what is missing, and the command that brings it.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::driver::{self, GpuFacts};
use crate::kernel_cache::KernelCache;
use crate::library::{DOCTOR, NOT_FOUND, emulated, require, version};
use crate::vendor::{Library, Version};

/// What was found on this machine; [`Display`](fmt::Display) prints it, a line a fact, and what works and does not at the end.
#[derive(Debug)]
pub struct Doctor {
    emulated: bool,
    libraries: Vec<FoundLibrary>,
    gpus: Result<Vec<GpuFacts>, String>,
    cache: FoundCache,
    /// `ID` of `/etc/os-release`.
    system: String,
    has_device_file: bool,
}

#[derive(Debug)]
struct FoundLibrary {
    library: Library,
    /// The file that serves, or why there is none.
    file: Result<String, String>,
    version: Option<Version>,
}

impl FoundLibrary {
    /// Whether there is a file that does not load.
    fn is_damaged(&self) -> bool {
        self.file.as_ref().is_err_and(|why| !why.contains(NOT_FOUND))
    }
}

#[derive(Debug)]
struct FoundCache {
    folder: Option<PathBuf>,
    programs: usize,
    bytes: u64,
    unwritable: Option<String>,
}

/// The libraries, GPUs and compiled kernels of this machine.
pub fn doctor() -> Doctor {
    let all = [Library::Driver, Library::Nvrtc, Library::CublasLt, Library::Nccl];
    let look = |library| FoundLibrary {
        library,
        file: require(library).map(str::to_string).map_err(|why| why.replace(DOCTOR, "")),
        version: version(library).ok(),
    };
    let cache = KernelCache::of_environment();
    let (programs, bytes) = cache.size();
    Doctor {
        emulated: emulated(),
        libraries: all.map(look).into(),
        gpus: driver::facts().and_then(|gpus| match gpus.is_empty() {
            true => Err("the driver finds no GPU".into()),
            false => Ok(gpus),
        }),
        cache: FoundCache {
            folder: cache.folder().map(Path::to_path_buf),
            programs,
            bytes,
            unwritable: cache.check_writable().err().map(|e| e.to_string()),
        },
        system: system(&std::fs::read_to_string("/etc/os-release").unwrap_or_default()),
        has_device_file: Path::new("/dev/nvidiactl").exists() || Path::new("/dev/dxg").exists(),
    }
}

/// Of the text of `/etc/os-release`.
fn system(text: &str) -> String {
    let id = text.lines().find_map(|line| line.strip_prefix("ID="));
    id.unwrap_or_default().trim_matches('"').to_string()
}

impl Doctor {
    /// Whether tensors can be made on a GPU, or on the emulator, and kernels compiled.
    pub fn works(&self) -> bool {
        self.gpus.is_ok() && self.wrong(Library::Nvrtc).is_none()
    }

    fn of(&self, library: Library) -> &FoundLibrary {
        &self.libraries[library as usize]
    }

    /// Why a library does not serve, if it does not.
    fn wrong(&self, library: Library) -> Option<String> {
        let found = self.of(library);
        let (driver, too_new) = (self.of(Library::Driver).version, |driver: &Version| {
            let of_cuda = matches!(library, Library::Nvrtc | Library::CublasLt);
            of_cuda && found.version.is_some_and(|version| version.0[0] > driver.0[0])
        });
        match (&found.file, driver.filter(too_new)) {
            (Err(why), _) => Some(why.clone()),
            (Ok(file), _) if found.version.is_none() => Some(format!("{file} does not say its version")),
            (Ok(_), Some(driver)) => {
                Some(format!("it is for a newer CUDA than the driver's {}", driver.short()))
            }
            _ => None,
        }
    }

    /// The one command that brings a library.
    fn remedy(&self, library: Library) -> String {
        // The driver's CUDA decides which libraries it can serve; without a driver the newest one is to come.
        let is_12 = self.of(Library::Driver).version.is_some_and(|driver| driver < Version([13, 0, 0]));
        let how = if self.of(library).is_damaged() { "--force-reinstall" } else { "--upgrade" };
        let wheel =
            |of_13: &str, of_12: &str| format!("pip install {how} {}", if is_12 { of_12 } else { of_13 });
        match library {
            Library::Driver if self.system == "debian" => "sudo apt-get install nvidia-driver".into(),
            Library::Driver => "sudo apt-get install nvidia-driver-580".into(),
            Library::Nvrtc => wheel("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
            Library::CublasLt => wheel("nvidia-cublas", "nvidia-cublas-cu12"),
            Library::Nccl => wheel("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        }
    }
}

/// What NCCL lacks at a version, in a line.
pub fn nccl_lacks(version: Version) -> Option<String> {
    let several = "it does not put several ranks on one GPU, as 2.30 does";
    (version < Version([2, 30, 0])).then(|| format!("NCCL {version}: {several}"))
}

fn name(library: Library) -> &'static str {
    match library {
        Library::Driver => "driver",
        Library::Nvrtc => "NVRTC",
        Library::CublasLt => "cuBLASLt",
        Library::Nccl => "NCCL",
    }
}

impl fmt::Display for Doctor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.emulated {
            writeln!(f, "PHALANX_CUDA=emulator: kernels run on the CPU")?;
        }
        for found in &self.libraries {
            let version = match (found.version, found.library) {
                (None, _) => String::new(),
                (Some(version), Library::Driver) => format!(", for CUDA up to {version}"),
                (Some(version), _) => format!(", {version}"),
            };
            let file = match &found.file {
                Ok(file) => file.clone(),
                Err(why) if found.is_damaged() => format!("damaged: {why}"),
                Err(_) => "not found".into(),
            };
            writeln!(f, "{:<9} {file}{version}", name(found.library))?;
        }
        for (index, gpu) in self.gpus.iter().flatten().enumerate() {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            let GpuFacts { name, capability: (major, minor), bytes } = gpu;
            let what = format!("compute capability {major}.{minor}, {:.1} GiB", gib(*bytes));
            writeln!(f, "GPU {index:<5} {name}, {what}")?;
        }
        let FoundCache { folder, programs, bytes, unwritable } = &self.cache;
        let state = unwritable.as_ref().map_or("writable".into(), |why| format!("not writable: {why}"));
        let mib = *bytes as f64 / f64::from(1 << 20);
        match folder {
            Some(folder) => {
                writeln!(f, "kernels   {}: {programs} programs, {mib:.1} MiB, {state}", folder.display())?;
            }
            None => writeln!(f, "kernels   not kept: PHALANX_KERNEL_CACHE is empty")?,
        }
        writeln!(f)?;
        self.write_uses(f)
    }
}

impl Doctor {
    /// What works and what does not, each with its remedy.
    fn write_uses(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let uses = [
            (Library::Driver, "tensors on a GPU", "does not work"),
            (Library::Nvrtc, "kernels", "does not work, but for kernels that were compiled before"),
            (Library::CublasLt, "matrix products by cuBLASLt", "slow: a kernel of Phalanx computes them"),
            (Library::Nccl, "ranks over NCCL", "does not work; ranks exchange data by way of the host"),
        ];
        for (library, what, otherwise) in uses {
            match (self.wrong(library), &self.gpus) {
                (None, Err(why)) if library == Library::Driver => writeln!(f, "{what}: {otherwise}: {why}")?,
                (None, _) => writeln!(f, "{what}: works")?,
                (Some(why), _) => {
                    writeln!(f, "{what}: {otherwise}: {why}\n    {}", self.remedy(library))?;
                }
            }
        }
        if !self.emulated && !self.has_device_file {
            let container = "a container has to be started with its GPUs, as `docker run --gpus all` does";
            writeln!(f, "no GPU is visible to this system (there is no /dev/nvidiactl); {container}")?;
        }
        if let Some(lacks) = self.of(Library::Nccl).version.and_then(nccl_lacks) {
            writeln!(f, "{lacks}\n    {}", self.remedy(Library::Nccl))?;
        }
        if let Some(why) = &self.cache.unwritable {
            writeln!(
                f,
                "kernels are compiled anew by each process: {why}; PHALANX_KERNEL_CACHE names a folder"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(versions: [Option<[u32; 3]>; 4]) -> Doctor {
        let all = [Library::Driver, Library::Nvrtc, Library::CublasLt, Library::Nccl];
        let found = |at: usize| FoundLibrary {
            library: all[at],
            file: versions[at]
                .map_or(Err(format!("{} {NOT_FOUND}", name(all[at]))), |_| Ok(format!("/lib/{at}.so"))),
            version: versions[at].map(Version),
        };
        let gpu = GpuFacts { name: "H100".into(), capability: (9, 0), bytes: 80 << 30 };
        Doctor {
            emulated: false,
            libraries: (0..4).map(found).collect(),
            gpus: if versions[0].is_some() { Ok(vec![gpu]) } else { Err("no driver here".into()) },
            cache: FoundCache { folder: Some("/k".into()), programs: 3, bytes: 3 << 20, unwritable: None },
            system: system("NAME=Ubuntu\nID=ubuntu\n"),
            has_device_file: true,
        }
    }

    #[test]
    fn a_whole_machine_works() {
        let doctor = machine([Some([13, 0, 0]), Some([13, 0, 0]), Some([13, 1, 0]), Some([2, 30, 7])]);
        assert!(doctor.works());
        let wanted = "\
driver    /lib/0.so, for CUDA up to 13.0
NVRTC     /lib/1.so, 13.0
cuBLASLt  /lib/2.so, 13.1
NCCL      /lib/3.so, 2.30.7
GPU 0     H100, compute capability 9.0, 80.0 GiB
kernels   /k: 3 programs, 3.0 MiB, writable

tensors on a GPU: works
kernels: works
matrix products by cuBLASLt: works
ranks over NCCL: works
";
        assert_eq!(doctor.to_string(), wanted);
    }

    #[test]
    fn each_missing_library_has_one_command_of_the_drivers_cuda() {
        let text = machine([None; 4]).to_string();
        for command in [
            "sudo apt-get install nvidia-driver-580\n",
            "pip install --upgrade nvidia-cuda-nvrtc\n",
            "pip install --upgrade nvidia-cublas\n",
            "pip install --upgrade nvidia-nccl-cu13\n",
        ] {
            assert!(text.contains(command), "{text}");
        }
        let text = machine([Some([12, 8, 0]), None, None, Some([2, 21, 5])]).to_string();
        for (command, times) in
            [("nvidia-cuda-nvrtc-cu12\n", 1), ("nvidia-cublas-cu12\n", 1), ("nvidia-nccl-cu12\n", 1)]
        {
            assert_eq!(text.matches(command).count(), times, "{text}");
        }
        assert!(
            text.contains("NCCL 2.21.5: it does not put several ranks on one GPU, as 2.30 does"),
            "{text}"
        );
        assert!(text.contains("ranks over NCCL: works"), "{text}");
    }

    #[test]
    fn a_compiler_for_a_newer_cuda_than_the_drivers_does_not_work() {
        let doctor = machine([Some([12, 8, 0]), Some([13, 0, 0]), Some([12, 8, 4]), Some([2, 30, 7])]);
        assert!(!doctor.works());
        let wanted = "it is for a newer CUDA than the driver's 12.8\n    pip install --upgrade nvidia-cuda-nvrtc-cu12\n";
        assert!(doctor.to_string().contains(wanted), "{doctor}");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_told() {
        let mut doctor = machine([Some([13, 0, 0]); 4]);
        doctor.cache.unwritable = Some("read-only file system".into());
        let text = doctor.to_string();
        assert!(text.contains("3.0 MiB, not writable: read-only file system\n"), "{text}");
        assert!(text.contains("compiled anew by each process"), "{text}");
    }
}
