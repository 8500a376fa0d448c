//! Compiled programs, kept on disk, so that a program's first step is quick from the second run on.
//!
//! The key is everything that decides the program: the compiler's version, options, source. A damaged file is written anew. Ranks of a run need the
//! same programs at the same time: [`KernelCache::compile_once`] lets one of them compile each, by a lock on a file beside, while the
//! others wait and read the result.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::cache::{Cache, Kind, hash, replace};
use crate::program::Image;

/// The versions of the compilers whose programs the folder has, a line each.
const COMPILERS: &str = "compilers";
/// How many files are for locks: programs share them.
const LOCKS: u64 = 64;

/// The compiled programs of a folder.
pub(crate) struct KernelCache(Cache);

impl KernelCache {
    /// Those of the environment's folder.
    pub(crate) fn of_environment() -> KernelCache {
        KernelCache(Cache::of_environment())
    }

    pub(crate) fn folder(&self) -> Option<&Path> {
        self.0.folder.as_deref()
    }

    /// The image under a key, of which this is the compiler's version. If it is not there, `compile` makes it, while other threads and
    /// processes that ask for it wait. Where the folder cannot be written each of them compiles it.
    pub(crate) fn compile_once(
        &self,
        (version, key): (&str, &str),
        compile: impl FnOnce() -> Result<Image, String>,
    ) -> Result<Image, String> {
        let key = format!("{version} {key}");
        if let Some(image) = self.load(&key) {
            return Ok(image);
        }
        let lock = self.lock(&key).ok();
        if let Some(image) = lock.as_ref().and_then(|_| self.load(&key)) {
            return Ok(image);
        }
        let image = compile()?;
        // What cannot be kept is compiled anew by the next process.
        let _ = self.store(&key, &image).and_then(|()| self.note_compiler(version));
        Ok(image)
    }

    /// The image that any compiler has left under a key, for a machine without one; the newest compiler's first.
    pub(crate) fn of_any_compiler(&self, key: &str) -> Option<Image> {
        let versions = fs::read_to_string(self.folder()?.join(COMPILERS)).ok()?;
        let number = |version: &&str| -> Vec<u32> { version.split('.').flat_map(str::parse).collect() };
        let mut versions: Vec<&str> = versions.lines().collect();
        versions.sort_by_key(number);
        versions.iter().rev().find_map(|version| self.load(&format!("{version} {key}")))
    }

    /// How many programs it has, and their bytes.
    pub(crate) fn size(&self) -> (usize, u64) {
        let files =
            self.folder().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
        let programs =
            files.filter(|file| file.path().extension().is_some_and(|end| end == Kind::Kernel.ending()));
        programs.fold((0, 0), |(n, bytes), file| (n + 1, bytes + file.metadata().map_or(0, |m| m.len())))
    }

    /// Whether programs can be kept.
    ///
    /// # Errors
    /// Why they cannot.
    pub(crate) fn check_writable(&self) -> io::Result<()> {
        let Some(folder) = self.folder() else { return Ok(()) };
        replace(&folder.join("written"), b"")?;
        fs::remove_file(folder.join("written"))
    }

    /// Waits until no other thread or process has the lock for a key; it is held until the file is dropped.
    fn lock(&self, key: &str) -> io::Result<File> {
        let folder = self.folder().ok_or(io::ErrorKind::NotFound)?;
        fs::create_dir_all(folder)?;
        let file = folder.join(format!("{:02}.lock", hash(&key) % LOCKS));
        let file = File::options().create(true).append(true).open(file)?;
        file.lock()?;
        Ok(file)
    }

    fn load(&self, key: &str) -> Option<Image> {
        parse(&self.0.load(Kind::Kernel, key)?)
    }

    fn store(&self, key: &str, image: &Image) -> io::Result<()> {
        self.0.store(Kind::Kernel, key, &bytes(image))
    }

    /// Notes that the folder has programs of a compiler.
    fn note_compiler(&self, version: &str) -> io::Result<()> {
        let Some(path) = self.folder().map(|folder| folder.join(COMPILERS)) else { return Ok(()) };
        if fs::read_to_string(&path).is_ok_and(|known| known.lines().any(|line| line == version)) {
            return Ok(());
        }
        // In one write; a line that two processes have added is no harm.
        File::options().create(true).append(true).open(path)?.write_all(format!("{version}\n").as_bytes())
    }
}

/// Length of the log, log, code.
fn bytes(image: &Image) -> Vec<u8> {
    let log = image.log.as_bytes();
    [&(log.len() as u64).to_le_bytes(), log, &image.code].concat()
}

fn parse(content: &[u8]) -> Option<Image> {
    let (length, rest) = content.split_at_checked(8)?;
    let length = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
    let (log, code) = rest.split_at_checked(length)?;
    Some(Image { code: code.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    fn cache(name: &str) -> KernelCache {
        let folder = std::env::temp_dir().join(format!("phalanx-kernels-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        KernelCache(Cache { folder: Some(folder) })
    }

    fn image(text: &str) -> Image {
        Image { code: text.as_bytes().repeat(1000), log: "12 registers".into() }
    }

    #[test]
    fn an_image_comes_back_and_a_short_one_counts_as_none() {
        let image = Image { code: vec![7; 100], log: "12 registers".into() };
        let content = bytes(&image);
        assert_eq!(parse(&content).as_ref(), Some(&image));
        for cut in 0..20 {
            assert_eq!(parse(&content[..cut]), None, "cut at {cut}");
        }
    }

    #[test]
    fn a_damaged_program_is_compiled_anew_and_a_kept_one_is_not() {
        let cache = cache("damaged");
        let ask = |made: &str| cache.compile_once(("13.0", "key"), || Ok(image(made))).unwrap();
        assert_eq!(ask("first"), image("first"));
        assert_eq!(ask("second"), image("first"));
        let path = cache.0.path(Kind::Kernel, "13.0 key").unwrap();
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert_eq!(ask("third"), image("third"));
        assert_eq!(ask("fourth"), image("third"));
        assert_eq!(cache.size().0, 1);
        fs::remove_dir_all(cache.folder().unwrap()).unwrap();
    }

    #[test]
    fn a_machine_without_a_compiler_reads_what_the_newest_one_has_left() {
        let cache = cache("compilers");
        for version in ["12.8", "13.0", "9.2", "12.8"] {
            cache.compile_once((version, "key"), || Ok(image(version))).unwrap();
        }
        assert_eq!(fs::read_to_string(cache.folder().unwrap().join(COMPILERS)).unwrap(), "12.8\n13.0\n9.2\n");
        assert_eq!(cache.of_any_compiler("key"), Some(image("13.0")));
        assert_eq!(cache.of_any_compiler("another"), None);
        fs::remove_dir_all(cache.folder().unwrap()).unwrap();
    }

    #[test]
    fn where_nothing_can_be_kept_programs_are_compiled_all_the_same() {
        let file = std::env::temp_dir().join(format!("phalanx-kernels-file-{}", std::process::id()));
        fs::write(&file, "no folder").unwrap();
        let cache = KernelCache(Cache { folder: Some(file.join("kernels")) });
        assert_eq!(cache.compile_once(("13.0", "key"), || Ok(image("made"))).unwrap(), image("made"));
        assert!(cache.check_writable().is_err());
        fs::remove_file(&file).unwrap();
        let none = KernelCache(Cache { folder: None });
        assert_eq!(none.compile_once(("13.0", "key"), || Ok(image("made"))).unwrap(), image("made"));
    }

    /// Set in the processes that the test below starts: the folder.
    const SHARED: &str = "PHALANX_TEST_SHARED_KERNELS";
    const PROGRAMS: usize = 20;

    /// What a process does: asks for all programs from two threads, and says which ones it has compiled.
    #[test]
    #[ignore = "a process of the test below"]
    fn ask_for_all_programs() {
        let cache = KernelCache(Cache { folder: std::env::var_os(SHARED).map(PathBuf::from) });
        let ask = |program: usize| {
            let compile = || {
                println!("compiled {program}.");
                std::thread::sleep(Duration::from_millis(10));
                Ok(image(&format!("program {program}")))
            };
            let got = cache.compile_once(("13.0", &format!("key {program}")), compile).unwrap();
            assert_eq!(got, image(&format!("program {program}")));
        };
        std::thread::scope(|threads| {
            threads.spawn(|| (0..PROGRAMS).for_each(ask));
            threads.spawn(|| (0..PROGRAMS).rev().for_each(ask));
        });
    }

    #[test]
    fn of_several_processes_one_compiles_each_program() {
        let cache = cache("shared");
        let start = || {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([
                "--exact",
                "kernel_cache::tests::ask_for_all_programs",
                "--ignored",
                "--nocapture",
            ]);
            command.env(SHARED, cache.folder().unwrap()).stdout(std::process::Stdio::piped()).spawn().unwrap()
        };
        let processes: Vec<_> = (0..4).map(|_| start()).collect();
        let mut said = String::new();
        for process in processes {
            let output = process.wait_with_output().unwrap();
            assert!(output.status.success());
            said += &String::from_utf8_lossy(&output.stdout);
        }
        for program in 0..PROGRAMS {
            assert_eq!(said.matches(&format!("compiled {program}.")).count(), 1, "{said}");
        }
        fs::remove_dir_all(cache.folder().unwrap()).unwrap();
    }
}
