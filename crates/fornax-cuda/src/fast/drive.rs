//! Which way decoding goes: weights from tapes, whole steps in one launch, or launches in a graph. What was asked for, else
//! the fastest by a short timing, which is kept for later loads. It knows no plan, no kernel and no clock.

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use fornax_plan::{Error, Result};

use crate::compiler;

/// The variable that asks for one way.
pub(crate) const VARIABLE: &str = "FORNAX_CUDA_DRIVER";

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drive {
    /// The fastest of those that the plan has.
    Either,
    /// A graph, whatever the plan.
    Graph,
    /// Whole steps, or none at all.
    Persistent,
    /// Weights from tapes for one sequence, whole steps for a few.
    Tape,
}

/// A way to decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Tape,
    Whole,
    Graph,
}

impl Way {
    pub(crate) const ALL: [Way; 3] = [Way::Tape, Way::Whole, Way::Graph];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Tape => "tape",
            Way::Whole => "persistent",
            Way::Graph => "graph",
        }
    }

    fn parse(text: &str) -> Option<Way> {
        Way::ALL.into_iter().find(|w| w.name() == text)
    }
}

/// The ways of steps of one row, and of several as far as whole steps reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ways {
    pub(crate) one: Way,
    pub(crate) several: Way,
}

impl Drive {
    /// What the environment asks for.
    ///
    /// # Errors
    /// `is_malformed` where it asks for something else.
    pub(crate) fn asked() -> Result<Drive> {
        let text = std::env::var_os(VARIABLE);
        Drive::parse(text.as_deref().map(|t| t.to_string_lossy()).as_deref())
    }

    pub(crate) fn parse(text: Option<&str>) -> Result<Drive> {
        match text {
            None | Some("") => Ok(Drive::Either),
            Some("graph") => Ok(Drive::Graph),
            Some("persistent") => Ok(Drive::Persistent),
            Some("tape") => Ok(Drive::Tape),
            Some(other) => Err(Error::malformed(format!(
                "cuda: {VARIABLE} is {other:?}, expected graph, persistent or tape"
            ))),
        }
    }

    /// Whether a way is wanted at all: one that was not asked for is none that steps of one row take.
    pub(crate) fn wants(self, way: Way) -> bool {
        match self {
            Drive::Either => true,
            Drive::Graph => way == Way::Graph,
            Drive::Persistent => way != Way::Tape,
            // A few rows have no tapes.
            Drive::Tape => true,
        }
    }

    /// Passes on what there is of a way; `why` says what a plan lacks that has none.
    ///
    /// # Errors
    /// `is_unsupported` where it was asked for and cannot be had.
    pub(crate) fn checked<T>(self, way: Way, made: Option<T>, why: &str) -> Result<Option<T>> {
        let what = match (self, way) {
            (Drive::Persistent, Way::Whole) => "whole steps in one launch",
            (Drive::Tape, Way::Tape) => "steps from tapes",
            _ => return Ok(made),
        };
        if made.is_none() {
            return Err(Error::unsupported(format!(
                "cuda: no {what} for this model ({why}), which {VARIABLE} asks for"
            )));
        }
        Ok(made)
    }
}

/// Times that every way is tried; the first try of each warms it up and does not count.
const TRIES: usize = 4;

/// What a timing found: the fastest, and the seconds of each.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) way: Way,
    pub(crate) seconds: Vec<(Way, f64)>,
}

/// The fastest of these ways by their best of a few tries, in turns; among equals the first. A way that fails is none.
///
/// # Errors
/// That of the last way where all fail; where the GPU is lost, at once.
pub(crate) fn fastest(ways: &[Way], mut time: impl FnMut(Way) -> Result<f64>) -> Result<Found> {
    let mut best: Vec<(Way, f64)> = ways.iter().map(|w| (*w, f64::INFINITY)).collect();
    let mut failed = None;
    for turn in 0..TRIES {
        let mut at = 0;
        while at < best.len() {
            match time(best[at].0) {
                Ok(seconds) => {
                    if turn > 0 {
                        best[at].1 = best[at].1.min(seconds);
                    }
                    at += 1;
                }
                Err(e) if e.is_lost() => return Err(e),
                Err(e) => {
                    failed = Some(e);
                    best.remove(at);
                }
            }
        }
    }
    let first = best.iter().copied().reduce(|a, b| if b.1 < a.1 { b } else { a });
    match (first, failed) {
        (Some((way, _)), _) => Ok(Found { way, seconds: best }),
        (None, Some(e)) => Err(e),
        (None, None) => Err(Error::malformed("cuda: there is no way to decode")),
    }
}

/// The place of a choice that was made before: a file beside the machine code.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    file: Option<PathBuf>,
}

impl Kept {
    /// Of a model and a GPU as `what` tells them apart from all others.
    pub(crate) fn new(folder: Option<&Path>, what: &impl Hash) -> Kept {
        let hash = |salt: u64| {
            let mut h = DefaultHasher::new();
            (salt, env!("CARGO_PKG_VERSION")).hash(&mut h);
            what.hash(&mut h);
            h.finish()
        };
        let name = format!("driver-{:016x}{:016x}.txt", hash(1), hash(2));
        Kept { file: folder.map(|f| f.join(name)) }
    }

    /// The choice, if it was made and can be had: `there` are the ways of one row, and of several.
    pub(crate) fn read(&self, there: [&[Way]; 2]) -> Option<Ways> {
        let text = std::fs::read_to_string(self.file.as_ref()?).ok()?;
        let way = |name: &str, there: &[Way]| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '))?;
            Way::parse(line.split(' ').next()?).filter(|w| there.contains(w))
        };
        Some(Ways { one: way("one", there[0])?, several: way("several", there[1])? })
    }

    /// Keeps a choice, with the times that led to it for whoever reads the file.
    pub(crate) fn write(&self, one: &Found, several: &Found) {
        let Some(file) = &self.file else { return };
        let mut text = String::new();
        for (name, found) in [("one", one), ("several", several)] {
            let _ = write!(text, "{name} {}", found.way.name());
            for (way, seconds) in &found.seconds {
                let _ = write!(text, " {}:{:.1}us", way.name(), 1e6 * seconds);
            }
            text.push('\n');
        }
        compiler::keep(file, text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_can_be_asked_for_and_nothing_else() {
        assert_eq!(Drive::parse(None).unwrap(), Drive::Either);
        assert_eq!(Drive::parse(Some("")).unwrap(), Drive::Either);
        assert_eq!(Drive::parse(Some("graph")).unwrap(), Drive::Graph);
        assert_eq!(Drive::parse(Some("persistent")).unwrap(), Drive::Persistent);
        assert_eq!(Drive::parse(Some("tape")).unwrap(), Drive::Tape);
        let e = Drive::parse(Some("Graph")).unwrap_err();
        assert!(e.is_malformed() && e.to_string().contains("graph, persistent or tape"), "{e}");
    }

    #[test]
    fn what_was_asked_for_is_had_or_refused_by_name() {
        assert_eq!(Drive::Persistent.checked(Way::Whole, Some(1), "").unwrap(), Some(1));
        assert_eq!(Drive::Either.checked(Way::Whole, None::<u32>, "moe").unwrap(), None);
        assert_eq!(Drive::Tape.checked(Way::Whole, None::<u32>, "moe").unwrap(), None);
        for (drive, way) in [(Drive::Persistent, Way::Whole), (Drive::Tape, Way::Tape)] {
            let e = drive.checked(way, None::<u32>, "moe").unwrap_err();
            assert!(e.is_unsupported() && e.to_string().contains("(moe)"), "{e}");
        }
    }

    /// Times by the list, one after the other, for each way.
    fn timer(times: &[(Way, &[f64])]) -> impl FnMut(Way) -> Result<f64> {
        let mut left: Vec<(Way, Vec<f64>)> =
            times.iter().map(|(w, t)| (*w, t.iter().rev().copied().collect())).collect();
        move |way| {
            let list = left.iter_mut().find(|l| l.0 == way).and_then(|l| l.1.pop());
            list.ok_or_else(|| Error::failed(format!("{} failed", way.name())))
        }
    }

    #[test]
    fn the_fastest_by_its_best_try_but_the_first_is_taken() {
        let found = fastest(
            &Way::ALL,
            timer(&[
                (Way::Tape, &[1.0, 5.0, 4.0, 6.0]),
                (Way::Whole, &[9.0, 8.0, 3.0, 7.0]),
                (Way::Graph, &[0.5, 4.0, 4.0, 4.0]),
            ]),
        )
        .unwrap();
        assert_eq!(found.way, Way::Whole, "a first try is no time");
        assert_eq!(found.seconds, [(Way::Tape, 4.0), (Way::Whole, 3.0), (Way::Graph, 4.0)]);
        let same: &[f64] = &[1.0; TRIES];
        let found = fastest(&Way::ALL, timer(&Way::ALL.map(|w| (w, same)))).unwrap();
        assert_eq!(found.way, Way::Tape, "among equals the first");
    }

    #[test]
    fn a_way_that_fails_is_none_and_a_lost_gpu_ends_the_timing() {
        let fine: &[f64] = &[2.0; TRIES];
        let found = fastest(
            &[Way::Tape, Way::Whole],
            timer(&[(Way::Tape, &[1.0, 1.0]), (Way::Whole, fine)]),
        )
        .unwrap();
        assert_eq!((found.way, found.seconds.len()), (Way::Whole, 1));
        let e = fastest(&[Way::Tape], timer(&[])).unwrap_err();
        assert!(e.is_failed(), "{e}");
        let mut asked = 0;
        let lost = |_| {
            asked += 1;
            Err(Error::lost("gone"))
        };
        assert!(fastest(&Way::ALL, lost).unwrap_err().is_lost());
        assert_eq!(asked, 1);
    }

    #[test]
    fn a_choice_is_kept_for_its_model_and_gpu_and_read_where_its_ways_are_there() {
        let folder = std::env::temp_dir().join(format!("fornax-drive-{}", std::process::id()));
        let kept = Kept::new(Some(&folder), &("a model", "a GPU"));
        let all: [&[Way]; 2] = [&Way::ALL, &[Way::Whole, Way::Graph]];
        assert_eq!(kept.read(all), None);
        let found = |way| Found { way, seconds: vec![(way, 3e-4), (Way::Graph, 1e-3)] };
        kept.write(&found(Way::Tape), &found(Way::Whole));
        let ways = Ways { one: Way::Tape, several: Way::Whole };
        assert_eq!(kept.read(all), Some(ways));
        assert_eq!(kept.read([&[Way::Whole], all[1]]), None, "no tapes this time");
        assert_eq!(Kept::new(Some(&folder), &("a model", "another")).read(all), None);
        let file = kept.file.clone().unwrap();
        assert_eq!(
            std::fs::read_to_string(&file).unwrap(),
            "one tape tape:300.0us graph:1000.0us\nseveral persistent persistent:300.0us graph:1000.0us\n"
        );
        std::fs::write(&file, "one tape\n").unwrap();
        assert_eq!(kept.read(all), None, "half a file");
        std::fs::remove_dir_all(&folder).unwrap();
        Kept::new(None, &0).write(&found(Way::Tape), &found(Way::Whole));
    }
}
