//! Copies what a rank writes, line by line, to the terminal and to a file.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

/// The file `DIR/rankI/NAME.log` of one of a rank's streams. It keeps what earlier processes of the rank have written in this run.
pub(crate) fn open(folder: &Path, rank: usize, restarts: usize, name: &str) -> io::Result<File> {
    let folder = folder.join(format!("rank{rank}"));
    fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{name}.log"));
    if restarts == 0 {
        return File::create(path);
    }
    let mut file = File::options().append(true).create(true).open(path)?;
    writeln!(file, "[{rank}] phalanx-launch: restart {restarts}")?;
    Ok(file)
}

/// Longer lines, such as that of a progress bar that never ends one, are copied in pieces of so many bytes.
const LINE_MAX: u64 = 1 << 16;

/// Copies `from` to its end. Lines go to the terminal and the file behind `prefix`, each in one piece. An output that is gone, such as a closed
/// pipe or a full disk, is written to no more; the others go on, and the rank is never blocked.
pub(crate) fn copy(
    from: impl Read,
    prefix: &str,
    mut terminal: Option<impl Write>,
    mut file: Option<impl Write>,
) {
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    loop {
        line.clear();
        match from.by_ref().take(LINE_MAX).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        // The last line may have no end.
        let end = if line.ends_with(b"\n") { &[][..] } else { b"\n" };
        let line = [prefix.as_bytes(), &line, end].concat();
        let write = |to: &mut _| Write::write_all(to, &line).and_then(|()| Write::flush(to));
        if terminal.as_mut().is_some_and(|terminal| write(terminal).is_err()) {
            terminal = None;
        }
        if file.as_mut().is_some_and(|file| file.write_all(&line).is_err()) {
            file = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so many bytes, then fails.
    struct Full(usize);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_have_a_prefix() {
        let (mut terminal, mut file) = (Vec::new(), Vec::new());
        copy(&b"one\n\xff two\nthree"[..], "[3] ", Some(&mut terminal), Some(&mut file));
        assert_eq!(terminal, b"[3] one\n[3] \xff two\n[3] three\n");
        assert_eq!(file, terminal);
    }

    #[test]
    fn a_line_without_end_is_copied_in_pieces() {
        let (long, mut terminal, mut file) = (vec![b'.'; 3 << 15], Vec::new(), Vec::new());
        copy(&long[..], "[0] ", Some(&mut terminal), Some(&mut file));
        assert_eq!(file, terminal);
        assert_eq!(
            terminal.split(|&b| b == b'\n').map(<[u8]>::len).collect::<Vec<_>>(),
            [4 + (1 << 16), 4 + (1 << 15), 0]
        );
    }

    #[test]
    fn a_full_disk_does_not_stop_the_terminal() {
        let mut terminal = Vec::new();
        copy(&b"one\ntwo\n"[..], "", Some(&mut terminal), Some(Full(5)));
        assert_eq!(terminal, b"one\ntwo\n");
    }
}
