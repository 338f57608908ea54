//! Errors in one line, for whoever writes them down and returns them to nobody.

use std::error::Error;

/// An error with all of its causes.
#[must_use]
pub fn line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Caused(Option<Box<Self>>, &'static str);

    impl std::fmt::Display for Caused {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.1)
        }
    }

    impl Error for Caused {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.0.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn causes_stand_behind_what_they_caused() {
        let last = Caused(None, "it is gone");
        assert_eq!(line(&last), "it is gone");
        let first = Caused(Some(Box::new(last)), "cannot read it");
        assert_eq!(line(&first), "cannot read it: it is gone");
    }
}
