# One process writes transactions with a write-ahead log, another reads what is committed.
import os, sqlite3, sys, time
path = "data.db"
def connect():
    base = sqlite3.connect(path, timeout=120, isolation_level=None)
    base.execute("pragma journal_mode=wal")
    return base
child = os.fork()
if child == 0:
    while not os.path.exists("ready"):
        time.sleep(0.01)
    base = connect()
    while not os.path.exists("stop"):
        count, most = base.execute("select count(*), coalesce(max(number), 0) from words").fetchone()
        if count != most:
            os._exit(7)
    os._exit(0)
base = connect()
base.execute("create table words(number integer primary key, word text, half integer)")
base.execute("create index halves on words(half)")
open("ready", "w").close()
for step in range(1, 1 << 40):
    base.execute("begin immediate")
    for number in range((step - 1) * 100 + 1, step * 100 + 1):
        base.execute("insert into words values(?, ?, ?)", (number, f"word {number * 7919 % 10007}", number // 2))
    base.execute("update words set word = word || '!' where half % 97 = ? and number > ?", (step % 97, step * 100 - 5000))
    base.execute("commit")
    total = base.execute("select sum(length(word)), count(distinct half) from words").fetchone()
    with open("steps", "a") as steps:
        steps.write(f"{step} {total}\n")
    if os.path.exists("stop"):
        break
if os.waitpid(child, 0)[1] != 0:
    sys.exit(6)
if base.execute("pragma integrity_check").fetchone() != ("ok",):
    sys.exit(8)
