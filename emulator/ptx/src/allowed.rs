//! Races that a program means to have, and that are not reported.

use std::str::FromStr;

use crate::Location;

/// Races that are not reported: in one place or everywhere, of any kind or only stores of equal values.
///
/// As text it is a place, with `equal@` before it for stores of equal values only. A place is a kernel's name or a line.
/// `equal` alone is for stores of equal values everywhere.
///
/// ```
/// use phalanx_ptx::AllowedRace;
///
/// for text in ["equal", "equal@mark_found", "equal@bfs.cu:31", "histogram", "bfs.cu:40"] {
///     let allowed: AllowedRace = text.parse()?;
/// }
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedRace {
    /// Only where two stores write the same value.
    pub equal: bool,
    /// Where.
    pub place: RacePlace,
}

/// Where races are allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RacePlace {
    /// In all kernels.
    Everywhere,
    /// In the kernel of this name, as the PTX or as the source has it.
    Kernel(String),
    /// Where one of the two accesses is at this line; the file is the end of a path.
    Line(String, u32),
}

impl FromStr for AllowedRace {
    type Err = String;

    fn from_str(text: &str) -> Result<AllowedRace, String> {
        let text = text.trim();
        let (equal, place) = match text.strip_prefix("equal@") {
            Some(place) => (true, place),
            None => (text == "equal", text),
        };
        if text == "equal" {
            return Ok(AllowedRace { equal, place: RacePlace::Everywhere });
        }
        let place = match place.rsplit_once(':') {
            Some((file, line)) => match line.parse() {
                Ok(line) if !file.is_empty() => RacePlace::Line(file.into(), line),
                _ => return Err(format!("`{text}`: a kernel, or FILE:LINE, wanted")),
            },
            None if place.is_empty() => return Err(format!("`{text}`: a kernel, or FILE:LINE, wanted")),
            None => RacePlace::Kernel(place.into()),
        };
        Ok(AllowedRace { equal, place })
    }
}

impl AllowedRace {
    /// Several, with commas between them.
    ///
    /// # Errors
    /// With the first that is neither a kernel nor a line.
    pub fn list(text: &str) -> Result<Vec<AllowedRace>, String> {
        text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::parse).collect()
    }

    /// Whether it allows a race in a kernel, of accesses at two lines; `equal` says that both write the same value.
    pub(crate) fn allows(&self, kernel: &str, lines: &[Option<&Location>; 2], equal: bool) -> bool {
        let here = match &self.place {
            RacePlace::Everywhere => true,
            // C++ compilers put a name's length before it.
            RacePlace::Kernel(name) => kernel == name || kernel.contains(&format!("{}{name}", name.len())),
            RacePlace::Line(file, line) => lines.iter().flatten().any(|at| at.is_at(file, *line)),
        };
        here && (equal || !self.equal)
    }
}

impl Location {
    /// Whether it, or a place where it was inlined, is a line of a file whose path ends so.
    fn is_at(&self, file: &str, line: u32) -> bool {
        let same_file =
            self.file.strip_suffix(file).is_some_and(|left| left.is_empty() || left.ends_with('/'));
        same_file && self.line == line || self.inlined_at.as_ref().is_some_and(|at| at.is_at(file, line))
    }
}
