" A timer edits a buffer on a terminal, beside a job; every step's text is hashed.
set nocompatible undolevels=100 noswapfile
let g:step = 0
let g:job = job_start(['cat'], {'mode': 'nl'})
function! Step(timer)
  let g:step += 1
  enew!
  call setline(1, map(range(1, 400), {_, n -> printf('%d line %d', (n * 7919 + g:step) % 1009, n)}))
  sort n
  silent %s/\(\d\+\) line \(\d\+\)/\2 of \1/
  silent g/^1/move 0
  silent normal! ggyGGp
  silent undo
  silent redo
  redraw
  call ch_sendraw(g:job, sha256(join(getline(1, '$'), "\n")) . "\n")
  let l:back = ch_readraw(g:job, {'timeout': 100000})
  call writefile([g:step . ' ' . trim(l:back)], 'steps', 'a')
  if filereadable('stop')
    call job_stop(g:job)
    qall!
  endif
endfunction
call timer_start(10, 'Step', {'repeat': -1})
