//! Generation in chains of several tokens, for devices that choose them beside the host: fewer hand-overs, and each token as
//! soon as it can be read. It chooses nothing.

use std::ops::ControlFlow;

use fornax_plan::{Progress, SlotId, TokenId, TokenOut, Tokens, Want};

use super::{Event, Finish, Request, Session};
use crate::error::{Error, Result};

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
            let ticket = self.submit(
                Tokens::Last { draft: &[] },
                &[(0..1, Want::Token { logprob: request.logprobs })],
                Some(request.sample),
                (self.chain.min(left), request.stop),
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
        }
        Ok(Finish::Length)
    }
}
