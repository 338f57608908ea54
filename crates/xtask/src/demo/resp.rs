//! A client of redis that keeps one TCP connection open: the protocol's values, and pipelines.
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::error::{Error, Result};

/// The most bytes that one value of an answer may have.
const VALUE_BYTES: usize = 16 << 20;
/// The most elements of an array, and how deep arrays may lie in each other.
const ELEMENTS: usize = 1 << 20;
const DEPTH: usize = 4;

/// What redis answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Text(String),
    Number(i64),
    Nothing,
    List(Vec<Value>),
    Failure(String),
}

/// One open connection.
pub struct Client {
    reader: BufReader<TcpStream>,
}

impl Client {
    /// Connects; every answer has to come within `deadline`.
    ///
    /// # Errors
    /// When nobody listens there.
    pub fn connect(server: SocketAddr, deadline: Duration) -> Result<Self> {
        let connect = || {
            let stream = TcpStream::connect_timeout(&server, deadline)?;
            stream.set_read_timeout(Some(deadline))?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let stream = connect().map_err(failed(format!("connect to {server}")))?;
        Ok(Self {
            reader: BufReader::new(stream),
        })
    }

    /// Returns the address of this end: it stays the same as long as the connection does.
    ///
    /// # Errors
    /// When the socket is not connected.
    pub fn address(&self) -> Result<SocketAddr> {
        self.reader
            .get_ref()
            .local_addr()
            .map_err(failed("ask for the own address".into()))
    }

    /// Sends one command and waits for its answer.
    ///
    /// # Errors
    /// When the connection fails or the answer is no value.
    pub fn ask(&mut self, words: &[&str]) -> Result<Value> {
        self.send(words)?;
        self.receive()
    }

    /// Sends one command without waiting.
    ///
    /// # Errors
    /// When the connection fails.
    pub fn send(&mut self, words: &[&str]) -> Result<()> {
        let mut bytes = Vec::new();
        encode(words, &mut bytes);
        self.send_all(&bytes)
    }

    /// Stores the keys `PREFIX:0`, … with values made from their numbers, a thousand a pipeline.
    ///
    /// # Errors
    /// When the connection fails or redis refuses one.
    pub fn fill(&mut self, prefix: &str, count: usize) -> Result<()> {
        let mut next = 0;
        while next < count {
            let end = count.min(next + 1000);
            let mut bytes = Vec::new();
            for number in next..end {
                encode(
                    &["SET", &format!("{prefix}:{number}"), &value_of(number)],
                    &mut bytes,
                );
            }
            self.send_all(&bytes)?;
            for _ in next..end {
                if let Value::Failure(why) = self.receive()? {
                    return Err(Error::Demo {
                        what: format!("redis refused a key: {why}"),
                    });
                }
            }
            next = end;
        }
        Ok(())
    }

    /// Waits for one answer.
    ///
    /// # Errors
    /// When the connection fails or the answer is no value.
    pub fn receive(&mut self) -> Result<Value> {
        read_value(&mut self.reader, 0).map_err(failed("read an answer of redis".into()))
    }

    fn send_all(&mut self, bytes: &[u8]) -> Result<()> {
        self.reader
            .get_mut()
            .write_all(bytes)
            .map_err(failed("send to redis".into()))
    }
}

/// The value stored under the key of a number.
pub fn value_of(number: usize) -> String {
    format!("value {number} {}", "x".repeat(number % 64))
}

fn failed(doing: String) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Connection { doing, source }
}

fn encode(words: &[&str], bytes: &mut Vec<u8>) {
    bytes.extend(format!("*{}\r\n", words.len()).bytes());
    for word in words {
        bytes.extend(format!("${}\r\n{word}\r\n", word.len()).bytes());
    }
}

fn read_value(reader: &mut impl BufRead, depth: usize) -> std::io::Result<Value> {
    let line = read_line(reader)?;
    let (Some(kind), Some(rest)) = (line.chars().next(), line.get(1..)) else {
        return Err(std::io::Error::other(format!(
            "no value begins with {line:?}"
        )));
    };
    let number = || rest.parse::<i64>().map_err(std::io::Error::other);
    match kind {
        '+' => Ok(Value::Text(rest.to_string())),
        '-' => Ok(Value::Failure(rest.to_string())),
        ':' => Ok(Value::Number(number()?)),
        '$' => match usize::try_from(number()?) {
            Err(_) => Ok(Value::Nothing),
            Ok(bytes) if bytes <= VALUE_BYTES => {
                let mut text = vec![0; bytes + 2];
                reader.read_exact(&mut text)?;
                text.truncate(bytes);
                Ok(Value::Text(String::from_utf8_lossy(&text).into_owned()))
            }
            Ok(bytes) => Err(std::io::Error::other(format!("a value of {bytes} bytes"))),
        },
        '*' => match usize::try_from(number()?) {
            Err(_) => Ok(Value::Nothing),
            Ok(count) if count <= ELEMENTS && depth < DEPTH => (0..count)
                .map(|_| read_value(reader, depth + 1))
                .collect::<std::io::Result<_>>()
                .map(Value::List),
            Ok(count) => Err(std::io::Error::other(format!("a list of {count} values"))),
        },
        _ => Err(std::io::Error::other(format!(
            "no value begins with {line:?}"
        ))),
    }
}

fn read_line(reader: &mut impl BufRead) -> std::io::Result<String> {
    let mut line = String::new();
    reader.take(64 << 10).read_line(&mut line)?;
    match line.strip_suffix("\r\n") {
        Some(line) => Ok(line.to_string()),
        None => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> std::io::Result<Value> {
        read_value(&mut text.as_bytes(), 0)
    }

    #[test]
    fn every_kind_of_answer_is_read() {
        assert_eq!(parse("+OK\r\n").unwrap(), Value::Text("OK".into()));
        assert_eq!(
            parse("-ERR no\r\n").unwrap(),
            Value::Failure("ERR no".into())
        );
        assert_eq!(parse(":-7\r\n").unwrap(), Value::Number(-7));
        assert_eq!(
            parse("$3\r\na\r\n\r\n").unwrap(),
            Value::Text("a\r\n".into())
        );
        assert_eq!(parse("$-1\r\n").unwrap(), Value::Nothing);
        let list = vec![Value::Number(1), Value::List(vec![])];
        assert_eq!(parse("*2\r\n:1\r\n*0\r\n").unwrap(), Value::List(list));
    }

    #[test]
    fn what_redis_never_says_is_an_error() {
        for text in [
            "",
            "\r\n",
            "+OK",
            "?\r\n",
            ":x\r\n",
            "$5\r\nab\r\n",
            "$99999999999\r\n",
            "é\r\n",
        ] {
            assert!(parse(text).is_err(), "{text:?}");
        }
        assert!(parse(&"*1\r\n".repeat(100)).is_err());
    }

    #[test]
    fn commands_are_lists_of_texts() {
        let mut bytes = Vec::new();
        encode(&["GET", "ä"], &mut bytes);
        assert_eq!(
            String::from_utf8(bytes).unwrap(),
            "*2\r\n$3\r\nGET\r\n$2\r\nä\r\n"
        );
    }
}
