//! [`Table`]: numbers of each step as CSV, for spreadsheets and data frames.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use phalanx_tensor::io::atomic;

/// An open table. Each row is in the file once it is added.
#[derive(Debug)]
pub struct Table {
    path: PathBuf,
    file: File,
    columns: usize,
}

impl Table {
    /// Creates a table with the columns `step` and `columns`. Replaces an existing file.
    ///
    /// # Errors
    ///
    /// The file cannot be written; the text has the path.
    pub fn create(path: &Path, columns: &[&str]) -> Result<Table, String> {
        Table::with(path, columns, &(header(columns) + "\n"))
    }

    /// Replaces a file by these lines. A power failure later leaves them.
    fn with(path: &Path, columns: &[&str], lines: &str) -> Result<Table, String> {
        atomic::write(path, |file| file.write_all(lines.as_bytes())).map_err(|e| e.to_string())?;
        let file = File::options().append(true).open(path);
        let file = file.map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Table { path: path.to_path_buf(), file, columns: columns.len() })
    }

    /// Opens a table and removes its rows from step `from` on. Creates it if there is none.
    ///
    /// # Errors
    ///
    /// The file has other columns, or cannot be read or written.
    pub fn resume(path: &Path, columns: &[&str], from: u64) -> Result<Table, String> {
        let fails = |e: std::io::Error| format!("{}: {e}", path.display());
        if !path.try_exists().map_err(fails)? {
            return Table::create(path, columns);
        }
        let before = std::fs::read(path).map_err(fails)?;
        // A damaged row does not have the form of one.
        let before = String::from_utf8_lossy(&before);
        let mut lines = before.lines();
        let (found, wanted) = (lines.next().unwrap_or_default(), header(columns));
        if found != wanted {
            return Err(format!("{}: has the columns `{found}`, not `{wanted}`", path.display()));
        }
        let mut kept = wanted + "\n";
        for line in lines.filter(|line| is_row(line, columns.len(), from)) {
            kept.push_str(line);
            kept.push('\n');
        }
        Table::with(path, columns, &kept)
    }

    /// Adds a step's row: a value for each column, or none if it was not measured.
    ///
    /// # Errors
    ///
    /// There are more or fewer values than columns, or the file cannot be written.
    pub fn row(&mut self, step: u64, values: &[Option<f64>]) -> Result<(), String> {
        if values.len() != self.columns {
            let [got, want] = [values.len(), self.columns];
            return Err(format!("{}: {got} values for {want} columns", self.path.display()));
        }
        let mut line = step.to_string();
        for value in values {
            line.push(',');
            if let Some(value) = value {
                let _ = write!(line, "{value}");
            }
        }
        self.line(line)
    }

    /// Writes a row at once, so that a killed run leaves whole rows.
    fn line(&mut self, line: String) -> Result<(), String> {
        self.file.write_all((line + "\n").as_bytes()).map_err(|e| format!("{}: {e}", self.path.display()))
    }
}

/// The header: `step` and the names; names with commas or quotes are quoted.
fn header(columns: &[&str]) -> String {
    let mut header = "step".to_owned();
    for column in columns {
        let quoted = column.contains([',', '"', '\n', '\r']);
        let name = column.replace('"', "\"\"").replace(['\n', '\r'], " ");
        let _ = if quoted { write!(header, ",\"{name}\"") } else { write!(header, ",{name}") };
    }
    header
}

/// Whether a line is a complete row of a step before `from`.
fn is_row(line: &str, columns: usize, from: u64) -> bool {
    let mut cells = line.split(',');
    let step = cells.next().and_then(|cell| cell.parse::<u64>().ok());
    step.is_some_and(|step| step < from)
        && cells.clone().count() == columns
        && cells.all(|cell| cell.is_empty() || cell.parse::<f64>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("report-table-{name}-{}.csv", std::process::id()))
    }

    #[test]
    fn rows_are_in_the_file_at_once() {
        let path = path("rows");
        let mut table = Table::create(&path, &["loss", "a,\"b\""]).unwrap();
        table.row(0, &[Some(5.5), None]).unwrap();
        table.row(1, &[Some(f64::NAN), Some(3e-5)]).unwrap();
        let content = std::fs::read_to_string(&path).unwrap();
        assert_eq!(content, "step,loss,\"a,\"\"b\"\"\"\n0,5.5,\n1,NaN,0.00003\n");
        assert_eq!(table.row(2, &[None]).unwrap_err(), format!("{}: 1 values for 2 columns", path.display()));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_resumed_table_keeps_earlier_steps_and_drops_half_rows() {
        let path = path("resume");
        std::fs::write(&path, b"step,loss,lr\n0,5,1\n1,,NaN\n1,\xff,3\n2,3,1\n3,2,1\n4,1").unwrap();
        let mut table = Table::resume(&path, &["loss", "lr"], 3).unwrap();
        table.row(3, &[Some(2.5), Some(1.0)]).unwrap();
        let content = std::fs::read_to_string(&path).unwrap();
        assert_eq!(content, "step,loss,lr\n0,5,1\n1,,NaN\n2,3,1\n3,2.5,1\n");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn other_columns_are_an_error_that_names_both() {
        let path = path("columns");
        Table::create(&path, &["loss"]).unwrap();
        let error = Table::resume(&path, &["loss", "lr"], 0).unwrap_err();
        assert_eq!(error, format!("{}: has the columns `step,loss`, not `step,loss,lr`", path.display()));
        std::fs::remove_file(&path).unwrap();
        assert!(Table::resume(&path, &["loss"], 5).is_ok(), "there was none, so it is new");
        std::fs::remove_file(path).unwrap();
    }
}
