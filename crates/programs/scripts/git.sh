# Commits, packs everything anew in two threads, checks it, and clones it.
export GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z'
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
rm -rf tree clone
git init -q -b main tree
cd tree
commit=0
while [ $commit -lt 12 ]; do
    commit=$((commit + 1))
    seq $commit $((commit * 3000)) > numbers
    seq $((commit * 77)) $((commit * 500 + 2000)) > others
    git add -A
    git commit -q -m "commit $commit"
done
git -c pack.threads=2 repack -q -adf --window=20
git fsck --full --strict 2>&1
cd ..
git clone -q "file://$PWD/tree" clone
git -C clone rev-list --objects --all | sha256sum
