//! [`Csv`]: a table as text, its columns as features and a label.

use std::collections::BTreeMap;
use std::path::Path;

use ::csv::{Reader, ReaderBuilder, StringRecord};
use phalanx_parallel::Content;
use phalanx_tensor::Tensor;

use super::dataset::{in_memory, in_range};
use super::{Dataset, HOST, wrong};
use crate::{Error, Result};

/// What the label's column, which is named, holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CsvLabel {
    /// A number, an f32 scalar.
    Number(String),
    /// An integer, an i64 scalar.
    Integer(String),
    /// The name of a class, an i64 scalar: its place among all names in sorted order.
    Class(String),
}

/// How a [`Csv`] is read: a line of column names first, and commas between cells.
#[derive(Clone, Debug)]
#[must_use = "it reads nothing before `open`"]
pub struct CsvConfig {
    features: Vec<String>,
    label: CsvLabel,
    delimiter: u8,
}

impl CsvConfig {
    /// The columns with these names, in this order, and the label's.
    pub fn new(features: &[&str], label: CsvLabel) -> CsvConfig {
        CsvConfig { features: features.iter().map(|&name| name.into()).collect(), label, delimiter: b',' }
    }

    /// Cells are separated by this byte.
    pub fn with_delimiter(self, delimiter: u8) -> CsvConfig {
        CsvConfig { delimiter, ..self }
    }

    /// Reads the table.
    ///
    /// # Errors
    /// If the file cannot be read, has no rows, or lacks a column; if a row has another number of cells, or a cell is not a finite number
    /// (of an integer label: an integer). The file, line, column and cell are named.
    pub fn open(self, path: impl AsRef<Path>) -> Result<Csv> {
        let path = path.as_ref();
        let reader = ReaderBuilder::new().delimiter(self.delimiter).from_path(path);
        let mut reader = reader.map_err(|e| wrong(path.display(), e))?;
        let mut table = Table::new(&self, path, &mut reader)?;
        let mut record = StringRecord::new();
        while reader.read_record(&mut record).map_err(|e| wrong(path.display(), e))? {
            table.push(&record)?;
        }
        table.finish()
    }
}

/// A table in memory. An item is the features `[columns]` f32 and the label, a scalar.
#[derive(Clone, Debug)]
pub struct Csv {
    names: Vec<String>,
    /// Row after row.
    features: Vec<f32>,
    labels: Labels,
    classes: Vec<String>,
}

#[derive(Clone, Debug)]
enum Labels {
    Numbers(Vec<f32>),
    Integers(Vec<i64>),
}

impl Csv {
    /// The names of the features' columns.
    pub fn features(&self) -> &[String] {
        &self.names
    }

    /// The names of the classes by their number; none unless the label is a class.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }
}

impl Dataset for Csv {
    fn contents(&self) -> Vec<Content> {
        let features = self.features.iter().flat_map(|x| x.to_le_bytes());
        let labels = match &self.labels {
            Labels::Numbers(labels) => in_memory(labels.iter().flat_map(|x| x.to_le_bytes())),
            Labels::Integers(labels) => in_memory(labels.iter().flat_map(|x| x.to_le_bytes())),
        };
        vec![in_memory(features), labels]
    }

    fn len(&self) -> usize {
        match &self.labels {
            Labels::Numbers(labels) => labels.len(),
            Labels::Integers(labels) => labels.len(),
        }
    }

    fn item(&self, index: usize, _draw: u64) -> Result<Vec<Tensor>> {
        in_range("Csv", index, self.len())?;
        let columns = self.names.len();
        let features = Tensor::from_slice(&self.features[index * columns..][..columns], &[columns], HOST)?;
        let label = match &self.labels {
            Labels::Numbers(labels) => Tensor::scalar(labels[index], HOST)?,
            Labels::Integers(labels) => Tensor::scalar(labels[index], HOST)?,
        };
        Ok(vec![features, label])
    }
}

/// A table that is being read.
struct Table<'a> {
    path: &'a Path,
    config: &'a CsvConfig,
    /// The places of the features' columns and of the label's.
    columns: Vec<usize>,
    label: usize,
    features: Vec<f32>,
    cells: Cells,
}

/// The label's cells so far.
enum Cells {
    Numbers(Vec<f32>),
    Integers(Vec<i64>),
    /// Numbers of names in the order in which they were first seen, and the names.
    Names(Vec<i64>, BTreeMap<String, i64>),
}

impl<'a> Table<'a> {
    /// Finds the columns in the first line.
    fn new(config: &'a CsvConfig, path: &'a Path, reader: &mut Reader<std::fs::File>) -> Result<Table<'a>> {
        let header = reader.headers().map_err(|e| wrong(path.display(), e))?;
        let place = |name: &String| {
            let found: Vec<usize> = (0..header.len()).filter(|&i| &header[i] == name).collect();
            match found[..] {
                [place] => Ok(place),
                _ => {
                    let columns: Vec<&str> = header.iter().collect();
                    let why = format!("got the columns {columns:?}, wanted one of the name `{name}`");
                    Err(wrong(path.display(), why))
                }
            }
        };
        let (CsvLabel::Number(name) | CsvLabel::Integer(name) | CsvLabel::Class(name)) = &config.label;
        let cells = match &config.label {
            CsvLabel::Number(_) => Cells::Numbers(Vec::new()),
            CsvLabel::Integer(_) => Cells::Integers(Vec::new()),
            CsvLabel::Class(_) => Cells::Names(Vec::new(), BTreeMap::new()),
        };
        let columns = config.features.iter().map(place).collect::<Result<_>>()?;
        Ok(Table { path, config, columns, label: place(name)?, features: Vec::new(), cells })
    }

    /// Reads a row.
    fn push(&mut self, record: &StringRecord) -> Result<()> {
        for (&column, name) in self.columns.iter().zip(&self.config.features) {
            let cell = &record[column];
            self.features
                .push(number(cell).ok_or_else(|| self.refuse(record, name, cell, "a finite number"))?);
        }
        let (CsvLabel::Number(name) | CsvLabel::Integer(name) | CsvLabel::Class(name)) = &self.config.label;
        let cell = &record[self.label];
        let read = match &mut self.cells {
            Cells::Numbers(cells) => number(cell).map(|number| cells.push(number)).ok_or("a finite number"),
            Cells::Integers(cells) => integer(cell).map(|integer| cells.push(integer)).ok_or("an integer"),
            Cells::Names(_, _) if cell.is_empty() => Err("the name of a class"),
            Cells::Names(cells, known) => {
                let next = known.len() as i64;
                cells.push(known.get(cell).copied().unwrap_or(next));
                known.entry(cell.into()).or_insert(next);
                Ok(())
            }
        };
        read.map_err(|wanted| self.refuse(record, name, cell, wanted))
    }

    fn refuse(&self, record: &StringRecord, column: &str, cell: &str, wanted: &str) -> Error {
        let line = record.position().map_or(0, ::csv::Position::line);
        let what = format!("{}, line {line}, column `{column}`", self.path.display());
        wrong(what, format!("got `{cell}`, wanted {wanted}"))
    }

    /// The whole table.
    fn finish(self) -> Result<Csv> {
        let path = self.path;
        let mut classes = Vec::new();
        let labels = match self.cells {
            Cells::Numbers(cells) => Labels::Numbers(cells),
            Cells::Integers(cells) => Labels::Integers(cells),
            Cells::Names(cells, known) => {
                let mut sorted = vec![0; known.len()];
                for (place, (name, first_seen)) in known.into_iter().enumerate() {
                    sorted[first_seen as usize] = place as i64;
                    classes.push(name);
                }
                Labels::Integers(cells.into_iter().map(|first_seen| sorted[first_seen as usize]).collect())
            }
        };
        let csv = Csv { names: self.config.features.clone(), features: self.features, labels, classes };
        match csv.is_empty() {
            true => {
                Err(wrong(path.display(), "got no rows, wanted at least one below the names of the columns"))
            }
            false => Ok(csv),
        }
    }
}

fn number(cell: &str) -> Option<f32> {
    cell.trim().parse().ok().filter(|number: &f32| number.is_finite())
}

fn integer(cell: &str) -> Option<i64> {
    cell.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Folder;
    use super::*;

    fn class() -> CsvLabel {
        CsvLabel::Class("kind".into())
    }

    #[test]
    fn columns_are_found_by_name_and_classes_numbered_in_sorted_order() {
        let folder = Folder::new();
        let path =
            folder.file("t.csv", "\u{feff}kind,a,\"b,c\"\npear,1, 2.5\n\"ap\"\"ple\",-3e1,4\npear,5,6\n");
        let csv = CsvConfig::new(&["b,c", "a"], class()).open(path).unwrap();
        assert_eq!(
            (csv.len(), csv.classes(), csv.features()),
            (3, &["ap\"ple".into(), "pear".into()][..], &["b,c".into(), "a".into()][..])
        );
        let item = csv.item(1, 0).unwrap();
        assert_eq!(item[0].to_vec::<f32>().unwrap(), [4.0, -30.0]);
        assert_eq!((item[1].shape(), item[1].item::<i64>().unwrap()), (&[][..], 0));
        assert_eq!(csv.item(2, 0).unwrap()[1].item::<i64>().unwrap(), 1);
        assert!(csv.item(3, 0).unwrap_err().to_string().contains("got item 3, wanted one of 3"));
    }

    #[test]
    fn labels_are_numbers_or_integers() {
        let folder = Folder::new();
        let path = folder.file("t.csv", "a;y;n\n1;0.5;-7\n2;1.5;9223372036854775807\n");
        let open = |label| CsvConfig::new(&["a"], label).with_delimiter(b';').open(&path).unwrap();
        let numbers = open(CsvLabel::Number("y".into()));
        assert_eq!(numbers.item(1, 0).unwrap()[1].item::<f32>().unwrap(), 1.5);
        assert!(numbers.classes().is_empty());
        let integers = open(CsvLabel::Integer("n".into()));
        assert_eq!(integers.item(0, 0).unwrap()[1].item::<i64>().unwrap(), -7);
        assert_eq!(integers.item(1, 0).unwrap()[1].item::<i64>().unwrap(), i64::MAX);
    }

    #[test]
    fn what_is_wrong_is_said_with_file_line_and_column() {
        let folder = Folder::new();
        let error = |text: &str, label: CsvLabel| {
            CsvConfig::new(&["a"], label).open(folder.file("t.csv", text)).err().unwrap().to_string()
        };
        let number = || CsvLabel::Number("kind".into());
        assert!(
            error("a,kind\n1,x\n\"two\n\",x\n", class())
                .ends_with("t.csv, line 3, column `a`: got `two\n`, wanted a finite number")
        );
        assert!(
            error("a,kind\n1,x\n,x\n", class())
                .ends_with("line 3, column `a`: got ``, wanted a finite number")
        );
        assert!(
            error("a,kind\nNaN,x\n", class())
                .ends_with("line 2, column `a`: got `NaN`, wanted a finite number")
        );
        assert!(
            error("a,kind\n1,\n", class())
                .ends_with("line 2, column `kind`: got ``, wanted the name of a class")
        );
        assert!(
            error("a,kind\n1,inf\n", number())
                .ends_with("line 2, column `kind`: got `inf`, wanted a finite number")
        );
        assert!(
            error("a,kind\n1,1.5\n", CsvLabel::Integer("kind".into()))
                .ends_with("got `1.5`, wanted an integer")
        );
        assert!(
            error("b,kind\n", class())
                .ends_with("got the columns [\"b\", \"kind\"], wanted one of the name `a`")
        );
        assert!(error("a,a,kind\n", class()).ends_with("wanted one of the name `a`"));
        assert!(error("a,b\n", class()).ends_with("wanted one of the name `kind`"));
        assert!(error("", class()).contains("wanted one of the name `a`"));
        assert!(
            error("a,kind\n", class())
                .ends_with("t.csv: got no rows, wanted at least one below the names of the columns")
        );
        let short = error("a,kind\n1,x\n2\n", class());
        assert!(short.contains("t.csv: ") && short.contains("line: 3"), "{short}");
        let missing =
            CsvConfig::new(&["a"], class()).open(folder.path("none.csv")).err().unwrap().to_string();
        assert!(missing.contains("none.csv: "), "{missing}");
    }
}
