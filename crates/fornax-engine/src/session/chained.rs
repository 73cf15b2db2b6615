//! Generation in chains of several tokens, for devices that choose them beside the host: fewer hand-overs, and each token as
//! soon as it can be read. It chooses nothing.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use fornax_plan::{Progress, SlotId, TokenId, TokenOut, Tokens, Want};

use super::{Event, Finish, Request, Session};
use crate::error::{Error, Result};

/// Tokens of a first chain, which shows how long one takes.
const FIRST: u32 = 4;

/// How many tokens a chain has: as many as come within a time, at the pace of the one before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    most: u32,
    time: Duration,
    /// Seconds a token.
    each: Option<f64>,
}

impl Pace {
    pub(super) fn new(most: u32, time: Duration) -> Pace {
        Pace { most, time, each: None }
    }

    /// Whether there are chains at all.
    pub(super) fn chains(&self) -> bool {
        self.most > 1
    }

    fn tokens(&self) -> u32 {
        let within = self.each.map_or(FIRST, |each| (self.time.as_secs_f64() / each) as u32);
        within.clamp(1, self.most)
    }

    fn took(&mut self, tokens: usize, time: Duration) {
        self.each = Some(time.as_secs_f64() / tokens as f64);
    }
}

impl Session {
    /// Goes on from the token that the device chose last, in chains of several tokens, `most` in all; each token is reported as
    /// soon as the device shows it.
    pub(super) fn chained(
        &mut self,
        request: &Request<'_>,
        last: TokenId,
        most: u32,
        mut report: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Finish> {
        let (mut last, mut left) = (last, most);
        while left > 0 {
            let begun = Instant::now();
            let ticket = self.submit(
                Tokens::Last { draft: &[] },
                &[(0..1, Want::Token { logprob: request.logprobs })],
                Some(request.sample),
                (self.pace.tokens().min(left), request.stop),
            )?;
            let (mut seen, mut ended) = (0, false);
            loop {
                let progress = self.program.poll(&ticket, &mut self.out);
                while let Some(TokenOut { token, logprob, .. }) = self.out.tokens.get(seen).copied()
                {
                    seen += 1;
                    if ended {
                        continue;
                    }
                    self.held.push(last);
                    (last, left) = (token, left - 1);
                    ended = request.stop.contains(&token)
                        || report(Event::Token { token, logprob }).is_break();
                    if ended {
                        self.program.stop(SlotId(0));
                    }
                }
                match progress {
                    Ok(Progress::Running) => std::thread::yield_now(),
                    _ => break,
                }
            }
            self.program.wait(ticket, &mut self.out)?;
            if seen == 0 {
                return Err(Error::device("generating: a step ended without a token"));
            }
            if ended {
                return Ok(Finish::Stop);
            }
            self.pace.took(seen, begun.elapsed());
        }
        Ok(Finish::Length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_as_long_as_their_time() {
        let mut pace = Pace::new(64, Duration::from_millis(20));
        assert_eq!(pace.tokens(), FIRST, "nothing is known yet");
        for (tokens, micros, want) in
            [(4, 4 * 320, 62), (62, 62 * 2_300, 8), (8, 8 * 50_000, 1), (1, 100, 64), (64, 0, 64)]
        {
            pace.took(tokens, Duration::from_micros(micros));
            assert_eq!(pace.tokens(), want, "{tokens} tokens in {micros} microseconds");
        }
        assert!(!Pace::new(1, Duration::MAX).chains());
        assert_eq!(Pace::new(1, Duration::MAX).tokens(), 1);
    }
}
