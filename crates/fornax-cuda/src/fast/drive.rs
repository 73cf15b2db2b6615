//! Which way decoding goes: whole steps in one launch, or launches in a graph. It knows no plan and no kernel.

use fornax_plan::{Error, Result};

/// The variable that asks for one way.
pub(crate) const VARIABLE: &str = "FORNAX_CUDA_DRIVER";

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drive {
    /// Whole steps where every op has a stage, else a graph.
    Either,
    /// A graph, whatever the plan.
    Graph,
    /// Whole steps, or none at all.
    Persistent,
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

    fn parse(text: Option<&str>) -> Result<Drive> {
        match text {
            None | Some("") => Ok(Drive::Either),
            Some("graph") => Ok(Drive::Graph),
            Some("persistent") => Ok(Drive::Persistent),
            Some(other) => Err(Error::malformed(format!(
                "cuda: {VARIABLE} is {other:?}, expected graph or persistent"
            ))),
        }
    }

    /// Passes on what there is of whole steps; `why` says what a plan lacks that has none.
    ///
    /// # Errors
    /// `is_unsupported` where they were asked for and cannot be had.
    pub(crate) fn checked<T>(self, steps: Option<T>, why: &str) -> Result<Option<T>> {
        if self == Drive::Persistent && steps.is_none() {
            return Err(Error::unsupported(format!(
                "cuda: no whole steps in one launch for this model ({why}), which {VARIABLE} asks for"
            )));
        }
        Ok(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_way_can_be_asked_for_and_nothing_else() {
        assert_eq!(Drive::parse(None).unwrap(), Drive::Either);
        assert_eq!(Drive::parse(Some("")).unwrap(), Drive::Either);
        assert_eq!(Drive::parse(Some("graph")).unwrap(), Drive::Graph);
        assert_eq!(Drive::parse(Some("persistent")).unwrap(), Drive::Persistent);
        let e = Drive::parse(Some("Graph")).unwrap_err();
        assert!(e.is_malformed() && e.to_string().contains("expected graph or persistent"), "{e}");
    }

    #[test]
    fn whole_steps_that_were_asked_for_are_had_or_refused_by_name() {
        assert_eq!(Drive::Persistent.checked(Some(1), "").unwrap(), Some(1));
        assert_eq!(Drive::Either.checked(None::<u32>, "moe").unwrap(), None);
        let e = Drive::Persistent.checked(None::<u32>, "moe").unwrap_err();
        assert!(e.is_unsupported() && e.to_string().contains("(moe)"), "{e}");
    }
}
