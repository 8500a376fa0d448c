//! An instruction's name with its modifiers and types.

use crate::code::{Order, Scope, Space};
use crate::lanes::round::Mode;
use crate::syntax::type_bytes;

/// Whether a part names a space that a bulk copy can reach.
pub(crate) fn is_space(part: &str) -> bool {
    part == "global" || part.starts_with("shared")
}

/// `add.rn.ftz.f32`, in its parts.
pub(crate) struct Form<'a> {
    pub(crate) parts: Vec<&'a str>,
}

impl<'a> Form<'a> {
    pub(crate) fn new(parts: &'a [String]) -> Form<'a> {
        Form { parts: parts.iter().map(String::as_str).collect() }
    }

    /// A part, or nothing.
    pub(crate) fn part(&self, at: usize) -> &'a str {
        self.parts.get(at).copied().unwrap_or("")
    }

    /// How many operands it has at least, where its family does not look.
    pub(crate) fn operands_min(&self) -> usize {
        match self.name() {
            "activemask" | "createpolicy" => 1,
            "bar" | "barrier" if self.has("red") => 3,
            "bar" | "barrier" if !self.has("cluster") => 1,
            "add" | "sub" | "mad" if !self.has("cc") => 0,
            "add" | "sub" | "addc" | "subc" | "ldmatrix" | "stmatrix" | "wmma" => 2,
            "mapa" => 3,
            "mad" | "madc" => 4,
            "wgmma" | "cp" if self.begins("wait_group") => 1,
            "cp" if self.begins("commit_group") || self.begins("wait_all") || self.has("prefetch") => 0,
            "cp" if self.has("mbarrier") => 1,
            "cp" if self.has("tensor")
                && self.parts.iter().rfind(|part| is_space(part)) != Some(&"global") =>
            {
                2
            }
            "cp" => 3 + (self.has("tensor") && self.begins("multicast")) as usize,
            "mbarrier" => match self.part(1) {
                "inval" | "arrive" | "arrive_drop" => 1,
                "test_wait" | "try_wait" => 3,
                _ => 2,
            },
            _ => 0,
        }
    }

    /// The first part.
    pub(crate) fn name(&self) -> &'a str {
        self.parts[0]
    }

    pub(crate) fn has(&self, part: &str) -> bool {
        self.parts[1..].contains(&part)
    }

    /// Whether a part begins like this.
    pub(crate) fn begins(&self, start: &str) -> bool {
        self.parts[1..].iter().any(|part| part.starts_with(start))
    }

    /// The types that are named, in order.
    pub(crate) fn kinds(&self) -> Vec<&'a str> {
        self.parts[1..].iter().copied().filter(|part| type_bytes(part).is_some()).collect()
    }

    /// The last type.
    pub(crate) fn kind(&self) -> Option<&'a str> {
        self.kinds().last().copied()
    }

    /// The direction of rounding.
    pub(crate) fn mode(&self) -> Option<Mode> {
        self.parts[1..].iter().find_map(|part| Mode::named(part))
    }

    /// The name with all modifiers but types, rounding, `.ftz` and those in `without`.
    pub(crate) fn key(&self, without: &[&str]) -> String {
        let kept = self.parts.iter().enumerate().filter(|(i, part)| {
            *i == 0
                || type_bytes(part).is_none()
                    && Mode::named(part).is_none()
                    && **part != "ftz"
                    && !without.contains(part)
        });
        kept.map(|(_, part)| *part).collect::<Vec<_>>().join(".")
    }
}

impl Form<'_> {
    /// The state space that is named.
    pub(crate) fn space(&self) -> Space {
        let named = |part: &&str| match *part {
            "global" | "const" => Some(Space::Global),
            "local" => Some(Space::Local),
            part if part.starts_with("param") => Some(Space::Parameter),
            part if part.starts_with("shared") => Some(Space::Shared),
            _ => None,
        };
        self.parts[1..].iter().find_map(named).unwrap_or(Space::Generic)
    }

    /// The threads among which a strong access or a fence counts.
    pub(crate) fn scope(&self) -> Scope {
        match () {
            () if self.has("cta") => Scope::Block,
            () if self.has("cluster") => Scope::Cluster,
            () => Scope::Device,
        }
    }

    pub(crate) fn order(&self, plain: Order) -> Order {
        match () {
            () if self.has("acq_rel") => Order::Both,
            () if self.has("acquire") => Order::Acquire,
            () if self.has("release") => Order::Release,
            () if self.has("relaxed") || self.has("volatile") || self.has("mmio") => Order::Relaxed,
            () => plain,
        }
    }
}
